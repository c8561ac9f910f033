"""rollout.*, reward.*, data.* and evaluation.*: what is asked, how it is answered and scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime_like.config.schema.base import MISSING, Config, key, positive, within
from slime_like.config.schema.reward_names import REMOTE, ROW, split_prefix
from slime_like.errors import ConfigError


@dataclass(kw_only=True)
class RolloutConfig(Config):
    """Sampling and the SGLang engines."""

    batch_size: int = key(32, "Prompts per rollout (slime: --rollout-batch-size).")
    n_samples_per_prompt: int = key(8, "Samples per prompt.")
    max_response_len: int = key(1024, "Most tokens sampled per response.")
    max_context_len: int | None = key(None, "Most tokens of prompt and response together; null: the model's.")
    temperature: float = key(1.0, "Sampling temperature; the trainer computes log-probabilities at the same one.")
    top_p: float = key(1.0, "Nucleus; only 1.0 is trainable, other values are refused.")
    top_k: int = key(-1, "Top-k; only -1 (all) is trainable, other values are refused.")
    stop_token_ids: list[int] = key([], "Tokens that end a response besides the tokenizer's EOS.")
    num_engines: int = key(1, "SGLang engines (data-parallel replicas).")
    tp: int = key(1, "Tensor parallel size of each engine (slime: --rollout-num-gpus-per-engine).")
    generate: str = key("single_turn", "Generate function: a name of table GENERATE or a dotted path.")
    agent: str | None = key(
        None,
        "For rollout.generate=openai_agent, dotted path of async def agent(base_url, api_key, prompt, metadata) -> reward "
        "or None.",
    )
    agent_deadline_s: float = key(600.0, "Longest time one run of the agent may take; then its sample fails.")
    agent_concurrency: int = key(256, "Runs of the agent at a time, of each dataset.")
    filters: list[str] = key([], "Group filters in order: names of table FILTERS or dotted paths.")
    max_refills: int = key(
        0, "Rounds of further prompts that replace groups which filters dropped, at most; 0: they are not replaced."
    )
    over_sampling_batch_size: int | None = key(
        None,
        "Groups begun for a rollout, of which the first batch_size to end are taken and the others stopped; also prompts "
        "per refill. null: batch_size, all waited for.",
    )
    partial_rollout: bool = key(
        False,
        "Groups that over-sampling stopped are continued in the next rollout; false: their prompts are answered anew.",
    )
    max_partial_staleness: int | None = key(
        None,
        "Versions that the oldest token of a continued group may lag behind the trainer: a rollout waits for those that "
        "would exceed it. null: loop.max_staleness + 4.",
    )
    max_running_requests: int | None = key(None, "Requests an engine decodes together; null: SGLang chooses.")
    start_deadline_s: float = key(
        600.0, "Longest wait for an engine to start; ranks have loop.step_deadline_s where that is longer."
    )
    request_deadline_s: float = key(1800.0, "Longest wait for one group's answers.")
    cpu_kernels: str = key(
        "auto",
        "How an engine on a CPU decodes: c (compiled here by a C compiler), torch, off (SGLang's own forward); auto: c, "
        "else torch.",
        choices=("auto", "c", "torch", "off"),
    )
    sglang: dict[str, Any] = key({}, "Extra SGLang ServerArgs fields; unknown ones are refused.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(
            prefix, self, "batch_size", "n_samples_per_prompt", "max_response_len", "max_context_len", "temperature"
        )
        positive(
            prefix,
            self,
            "max_partial_staleness",
            "num_engines",
            "tp",
            "max_running_requests",
            "start_deadline_s",
            "request_deadline_s",
        )
        positive(prefix, self, "agent_deadline_s", "agent_concurrency")
        within(prefix, self, 0, 1e6, "max_refills")
        if self.max_refills and not self.filters:
            raise ConfigError(
                f"{prefix}max_refills={self.max_refills} has no effect without {prefix}filters, as nothing is dropped: "
                f"set {prefix}filters=[nonzero_std], or remove it"
            )
        self._check_over_sampling(prefix)

    def _check_over_sampling(self, prefix: str) -> None:
        begun, needed = self.over_sampling_batch_size, self.batch_size
        if begun is not None and begun < needed:
            raise ConfigError(
                f"{prefix}over_sampling_batch_size={begun} is below {prefix}batch_size={needed}: a first round could never "
                "fill a rollout; raise it"
            )
        if self.partial_rollout and begun is None:
            raise ConfigError(
                f"{prefix}partial_rollout=true has no effect without {prefix}over_sampling_batch_size, as every group is "
                f"waited for: set {prefix}over_sampling_batch_size={needed * 3 // 2 + 1}, or remove it"
            )
        if self.max_partial_staleness is not None and not self.partial_rollout:
            raise ConfigError(
                f"{prefix}max_partial_staleness={self.max_partial_staleness} has no effect without "
                f"{prefix}partial_rollout=true: set that, or remove it"
            )


@dataclass(kw_only=True)
class RewardConfig(Config):
    """Who scores, and where."""

    name: str = key(
        "math",
        "Default reward: a name of table REWARDS, also with the prefix boxed_, or a dotted path. A row's rm_type overrides a "
        "name; a dotted path scores every row.",
    )
    weights: dict[str, float] = key(
        {},
        "Name or dotted path -> weight: the score is the weighted sum; rm_type stands for the row's own reward, or else "
        "reward.name. Empty: that one alone.",
    )
    workers: int = key(2, "Processes of the reward pool.")
    timeout_s: float = key(30.0, "Longest time one call may take, retries of a reward server included.")
    memory_gb: float | None = key(
        4.0,
        "GiB of private memory that a process of the reward pool, and each that it starts, may take; null: no limit.",
    )
    fallback: float | None = key(
        0.0,
        "Score of a sample whose reward missed its deadline, whose process was killed or whose reward server did not "
        "answer; null: the sample is left out of training.",
    )
    remote_url: str | None = key(None, "Address that reward remote_rm posts to (slime: --rm-url).")
    remote_retries: int = key(4, "Further requests to a reward server that fails, with growing pauses.")
    remote_concurrency: int = key(64, "Requests to the reward server at a time.")
    overlong_buffer_len: int | None = key(
        None, "Tokens before rollout.max_response_len over which a penalty grows (DAPO); null: no penalty."
    )
    overlong_penalty_factor: float = key(1.0, "Penalty of a response as long as rollout.max_response_len.")
    shuffle: bool = key(False, "Control experiment: permute rewards over the batch, so that nothing can be learnt.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "workers", "timeout_s", "memory_gb", "overlong_buffer_len", "overlong_penalty_factor")
        positive(prefix, self, "remote_concurrency")
        within(prefix, self, 0, 100, "remote_retries")
        within(prefix, self, -1e9, 1e9, "fallback")
        self._check_weights(prefix)
        self._check_remote(prefix)
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != 1.0:
            raise ConfigError(
                f"{prefix}overlong_penalty_factor={self.overlong_penalty_factor} has no effect without "
                f"{prefix}overlong_buffer_len: set that too, or remove it"
            )

    def _check_weights(self, prefix: str) -> None:
        for name, weight in self.weights.items():
            if not -1e9 <= weight <= 1e9 or weight == 0:
                raise ConfigError(f"{prefix}weights.{name}={weight} must be a finite number other than 0")
        if self.weights and ROW not in self.weights and self.name != RewardConfig.name:
            raise ConfigError(
                f"{prefix}name={self.name!r} has no effect with {prefix}weights of {', '.join(self.weights)}: give "
                f"{prefix}weights.{ROW} its weight, which stands for {prefix}name and for a row's own reward, or remove it"
            )

    def _check_remote(self, prefix: str) -> None:
        if self.remote_url is not None:
            parts = urlsplit(self.remote_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    f"{prefix}remote_url={self.remote_url!r} is no address: write it as http://host:port/path"
                )
            return
        asks = [name for name in (self.name, *self.weights) if split_prefix(name)[1] == REMOTE]
        if asks:
            raise ConfigError(f"reward {asks[0]!r} asks a reward server: set {prefix}remote_url=http://host:port/path")


@dataclass(kw_only=True)
class DataConfig(Config):
    """Training prompts, in slime's format."""

    train: str = key(MISSING, "jsonl or parquet of prompts, with an optional slice: path@[a:b].")
    source: str = key("file", "Data source: a name of table DATA_SOURCES or a dotted path.")
    input_key: str = key("prompt", "Column of the prompt, a string or chat messages; a.b is b inside of column a.")
    label_key: str = key("label", "Column of the label, such as label or reward_model.ground_truth.")
    metadata_key: str = key("metadata", "Column of the metadata.")
    apply_chat_template: bool = key(
        False, "Render string prompts as a user turn by the tokenizer's chat template (messages always are)."
    )
    chat_template_kwargs: dict[str, Any] = key({}, "Passed to the chat template.")
    conversation: str = key(
        "turns",
        "With algo=sft, how chat messages that end with an assistant's turn become tokens: turns, each message by the chat "
        "template on its own; whole, all messages at once (ChatML templates). Every turn of the assistant is trained on.",
        choices=("turns", "whole"),
    )
    max_prompt_len: int | None = key(
        None, "Longest prompt in tokens; a row with a longer one cannot be used. null: the context is the limit."
    )
    shuffle: bool = key(True, "New order every epoch (slime: --rollout-shuffle).")
    on_bad_row: str = key(
        "stop", "A row that cannot be used: stop the run at load, or skip and count it.", choices=("stop", "skip")
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "max_prompt_len")


@dataclass(kw_only=True)
class EvalConfig(Config):
    """Held-out prompts."""

    datasets: dict[str, str] = key({}, "Name -> file, with an optional slice; metrics eval/<name>...")
    interval: int | None = key(None, "Evaluate every N rollouts; null: only before the first and after the last.")
    before_train: bool = key(True, "Evaluate before the first rollout (slime: --skip-eval-before-train turns it off).")
    n_samples_per_prompt: int = key(1, "Samples per held-out prompt.")
    temperature: float = key(0.0, "0: greedy.")
    top_p: float = key(1.0, "Nucleus.")
    top_k: int = key(-1, "Top-k; -1: all.")
    max_response_len: int | None = key(None, "Most tokens per response; null: rollout.max_response_len.")
    save_answers: bool = key(True, "Write every answer with its score to dir/eval/step_<N>.jsonl.")
    overrides: dict[str, Any] = key(
        {},
        "Name of a set -> settings of its own: n_samples_per_prompt, temperature, top_p, top_k, max_response_len, rm_type, "
        "input_key, label_key, metadata_key, apply_chat_template.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "interval", "n_samples_per_prompt", "max_response_len")
        within(prefix, self, 0.0, 10.0, "temperature")
        within(prefix, self, 0.0, 1.0, "top_p")
        within(prefix, self, -1, 1e9, "top_k")
