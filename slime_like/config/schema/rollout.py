"""rollout.*, reward.*, data.* and evaluation.*: prompts, sampling, engines and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime_like.config.schema.base import MISSING, Config, key, positive, within
from slime_like.config.schema.flow_mla import FlowMlaConfig
from slime_like.config.schema.remote_experts import RemoteExpertsConfig
from slime_like.config.schema.reward_names import REMOTE, ROW, split_prefix
from slime_like.errors import ConfigError

AUTO = "auto"
FLOAT8 = "float8"


@dataclass(kw_only=True)
class RolloutConfig(Config):
    """Sampling and SGLang engines."""

    batch_size: int = key(32, "Prompts per rollout (slime: --rollout-batch-size).")
    n_samples_per_prompt: int = key(8, "Samples per prompt.")
    max_response_len: int = key(1024, "Maximum response length in tokens.")
    max_context_len: int | None = key(None, "Maximum length of prompt plus response in tokens; null: the model's.")
    temperature: float = key(
        1.0, "Sampling temperature; the trainer computes log-probabilities at the same temperature."
    )
    top_p: float = key(1.0, "Nucleus sampling; 1: off. Other values only with run.mode=rollout_only.")
    top_k: int = key(-1, "Top-k sampling; -1: all. Other values only with run.mode=rollout_only.")
    stop_token_ids: list[int] = key([], "Token ids that end a response, in addition to the tokenizer's EOS.")
    num_engines: int = key(1, "SGLang engines (data-parallel replicas).")
    num_managers: int = key(
        1,
        "Rollout manager processes, each with an equal share of the engines and of the prompts, for runs that sample more tokens "
        "than one process can handle (docs/rollouts.md).",
    )
    tp: int = key(1, "Tensor parallel size of each engine (slime: --rollout-num-gpus-per-engine).")
    engine_num_nodes: int | None = key(
        None,
        "Number of nodes of each engine, with rollout.tp / engine_num_nodes ranks on each; null: on GPUs the fewest nodes whose GPUs "
        "suffice, on CPUs 1 (docs/nodes.md).",
    )
    dp_attention: int = key(
        1,
        "Data-parallel attention: number of groups into which an engine's ranks are split. Each group has all attention "
        "weights and attends to its own sequences; experts are shared by all ranks "
        "(slime: --sglang-dp-size with --sglang-enable-dp-attention).",
    )
    flow_mla: FlowMlaConfig = key(FlowMlaConfig, "Attention weights sharded over the ranks of rollout.dp_attention.")
    remote_experts: RemoteExpertsConfig = key(
        RemoteExpertsConfig, "Part of the experts of each layer in the memory of a worker process."
    )
    dcp: int | str = key(
        1,
        "Decode context parallel size: number of ranks of an engine over which the KV cache of each sequence is split, for models "
        "with fewer KV heads than rollout.tp; auto: the largest useful size if the planner predicts that the KV cache limits "
        "concurrency, otherwise 1 (docs/dcp.md).",
    )
    dcp_comm: str = key(
        "auto",
        "Exchange of partial attention in a DCP group. ag_rs: all-gather of normalisers, then a sum over ranks; a2a: one "
        "all-to-all (not with triton attention on a GPU); auto: a2a on a CPU, ag_rs on a GPU.",
        choices=("auto", "ag_rs", "a2a"),
    )
    dcp_replicate_q: bool = key(
        False,
        "Each rank of a DCP group computes the queries of the whole group in decode steps, with copies of the other ranks' query "
        "projections, instead of gathering them (SGLang: --dcp-replicate-q-proj; only on a CPU with rollout.dcp_comm=a2a).",
    )
    weight_dtype: str = key(
        "auto",
        "Weights of the engines. auto: model.dtype; float8: the float8 weights and scales of model.hf_checkpoint as stored, with "
        "run.mode=rollout_only on GPUs (docs/rollouts.md).",
        choices=("auto", FLOAT8),
    )
    symmetric_memory: bool = key(
        False,
        "Use NCCL symmetric memory for the collectives of an engine's ranks, including the exchanges of rollout.dcp (SGLang: "
        "--enable-symm-mem; GPUs only).",
    )
    generate: str = key(
        "single_turn",
        "Generate function: a name registered in GENERATE, or an import path such as my_pkg.my_mod:function.",
    )
    agent: str | None = key(
        None,
        "With rollout.generate=openai_agent, import path (my_pkg.my_mod:function) of async def agent(base_url, api_key, prompt, "
        "metadata) -> reward or None.",
    )
    agent_deadline_s: float = key(600.0, "Time limit of one agent run; its sample fails after that.")
    agent_concurrency: int = key(256, "Maximum concurrent agent runs per dataset and rollout manager.")
    filters: list[str] = key(
        [],
        "Group filters, applied in order: names registered in FILTERS, or import paths such as my_pkg.my_mod:function.",
    )
    max_refills: int = key(
        0,
        "Maximum rounds of additional prompts that replace groups dropped by filters; the run ends if they do not suffice. "
        "0: dropped groups are not replaced.",
    )
    over_sampling_batch_size: int | None = key(
        None,
        "Groups started per rollout: the first batch_size that finish and pass the filters are used, the others are "
        "interrupted. Also the number of prompts per refill. null: batch_size, and no group is interrupted.",
    )
    partial_rollout: bool = key(
        False,
        "In the next rollout, continue the groups that over-sampling interrupted; false: abort them and sample their prompts again.",
    )
    max_partial_staleness: int | None = key(
        None,
        "Maximum number of weight versions that a continued group's oldest token may lag behind the trainer; a rollout waits "
        "for groups that would exceed it. null: loop.max_staleness + 4.",
    )
    max_running_requests: int | str | None = key(
        None,
        "Maximum concurrent requests per engine; null: SGLang chooses; auto: as many as fit the engine's KV cache with their "
        "expected responses (docs/rollouts.md).",
    )
    start_deadline_s: float = key(
        600.0,
        "Time limit of an engine's start; for trainer ranks, the longer of this and loop.step_deadline_s applies.",
    )
    request_deadline_s: float = key(1800.0, "Time limit of one HTTP request to an engine; a group may need several.")
    cpu_kernels: str = key(
        "auto",
        "Decode kernels of a CPU engine: c (compiled when the run starts), torch, or off (SGLang's forward); auto: c, but torch "
        "if there is no C compiler and for attention over latents of 512 or more dimensions, and off with run.deterministic.",
        choices=("auto", "c", "torch", "off"),
    )
    sglang: dict[str, Any] = key({}, "Extra fields of SGLang's ServerArgs; unknown fields are refused.")

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
            "num_managers",
            "tp",
            "engine_num_nodes",
            "dp_attention",
            "start_deadline_s",
            "request_deadline_s",
        )
        self._check_dcp(prefix)
        self._check_admission(prefix)
        positive(prefix, self, "agent_deadline_s", "agent_concurrency")
        within(prefix, self, 0, 1e6, "max_refills")
        if self.max_refills and not self.filters:
            raise ConfigError(
                f"{prefix}max_refills={self.max_refills} has no effect without {prefix}filters, because no group is dropped: "
                f"set {prefix}filters=[nonzero_std], or remove {prefix}max_refills"
            )
        self._check_over_sampling(prefix)

    def _check_dcp(self, prefix: str) -> None:
        if self.dcp == AUTO:
            return
        if isinstance(self.dcp, str):
            raise ConfigError(
                f"{prefix}dcp={self.dcp!r} is neither a number nor {AUTO}: set a number of ranks, or {AUTO} to let the plan choose"
            )
        positive(prefix, self, "dcp")

    def _check_admission(self, prefix: str) -> None:
        limit = self.max_running_requests
        if isinstance(limit, str) and limit != AUTO:
            raise ConfigError(
                f"{prefix}max_running_requests={limit!r} is neither a number nor {AUTO}: set a number of requests, {AUTO}, or "
                "null to let SGLang choose"
            )
        if limit is not None and not isinstance(limit, str) and limit <= 0:
            raise ConfigError(f"{prefix}max_running_requests={limit!r} must be above 0")
        if limit == AUTO and "schedule_conservativeness" in self.sglang:
            raise ConfigError(
                f"{prefix}sglang.schedule_conservativeness has no effect with {prefix}max_running_requests={AUTO}, which replaces "
                f"the estimate that this field scales: remove {prefix}sglang.schedule_conservativeness, or set "
                f"{prefix}max_running_requests=null"
            )

    def _check_over_sampling(self, prefix: str) -> None:
        num_started, batch_size = self.over_sampling_batch_size, self.batch_size
        if num_started is not None and num_started < batch_size:
            raise ConfigError(
                f"{prefix}over_sampling_batch_size={num_started} is below {prefix}batch_size={batch_size}: the first round could never "
                f"fill a rollout; raise {prefix}over_sampling_batch_size"
            )
        if self.partial_rollout and num_started is None:
            raise ConfigError(
                f"{prefix}partial_rollout=true has no effect without {prefix}over_sampling_batch_size, because a "
                f"rollout then waits for every group: set {prefix}over_sampling_batch_size={batch_size * 3 // 2 + 1}, or "
                f"remove {prefix}partial_rollout"
            )
        if self.max_partial_staleness is not None and not self.partial_rollout:
            raise ConfigError(
                f"{prefix}max_partial_staleness={self.max_partial_staleness} has no effect without "
                f"{prefix}partial_rollout=true: set {prefix}partial_rollout=true, or remove {prefix}max_partial_staleness"
            )


@dataclass(kw_only=True)
class RewardConfig(Config):
    """Reward functions and their process pool."""

    name: str = key(
        "math",
        "Default reward: a name registered in REWARDS, optionally with the prefix boxed_, or an import path such as "
        "my_pkg.my_mod:function. A row's rm_type overrides a registered name; an import path scores every row.",
    )
    weights: dict[str, float] = key(
        {},
        "Weights of rewards, by name or import path: the score is the weighted sum. The name rm_type stands for the row's reward, "
        "or for reward.name if the row has none. Empty: rm_type alone, with weight 1.",
    )
    workers: int = key(2, "Processes of the reward pool of each rollout manager.")
    timeout_s: float = key(30.0, "Time limit of one reward call, including retries of a reward server.")
    memory_gb: float | None = key(
        4.0,
        "Private memory limit in GiB of each process of the reward pool and of each process that it starts; null: no limit.",
    )
    fallback: float | None = key(
        0.0,
        "Score of a sample if the reward call timed out, the call's process was killed or the reward server did not "
        "respond; null: exclude the sample from training.",
    )
    remote_url: str | None = key(None, "URL that reward remote_rm posts to (slime: --rm-url).")
    remote_retries: int = key(4, "Retries when a request to the reward server fails, with exponential backoff.")
    remote_concurrency: int = key(64, "Maximum concurrent requests of each rollout manager to the reward server.")
    overlong_buffer_len: int | None = key(
        None, "Length penalty over the last N tokens before rollout.max_response_len (DAPO); null: no penalty."
    )
    overlong_penalty_factor: float = key(1.0, "Penalty of a response of rollout.max_response_len tokens.")
    shuffle: bool = key(
        False, "Control experiment: permute rewards within the batch, which removes the learning signal."
    )

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
                f"{prefix}overlong_buffer_len: set {prefix}overlong_buffer_len, or remove {prefix}overlong_penalty_factor"
            )

    def components(self, rm_type: str | None, *, unshaped: bool = False) -> Mapping[str, float]:
        """Return a dict from the name of each reward of a row with this ``rm_type`` to the reward's weight.

        The row's own reward is its ``rm_type``, or ``name`` if it has none or if ``name`` is an import path. In ``weights``,
        the key ``rm_type`` stands for it. The row's own reward is the only one, with weight 1, in two cases: if ``weights``
        is empty; and with ``unshaped`` (evaluation), if ``weights`` has the key ``rm_type``.

        Example: ``weights={"rm_type": 1.0, "my:f": 0.1}`` and a row of rm_type ``math`` give ``{"math": 1.0, "my:f": 0.1}``.
        """
        row_reward = self.name if rm_type is None or ":" in self.name else rm_type
        if not self.weights or (unshaped and ROW in self.weights):
            return {row_reward: 1.0}
        weights: dict[str, float] = {}
        for key_name, weight in self.weights.items():
            name = row_reward if key_name == ROW else key_name
            weights[name] = weights.get(name, 0.0) + weight
        return weights

    def _check_weights(self, prefix: str) -> None:
        for name, weight in self.weights.items():
            if not -1e9 <= weight <= 1e9 or weight == 0:
                raise ConfigError(f"{prefix}weights.{name}={weight} must be a finite number other than 0")
        if self.weights and ROW not in self.weights and self.name != RewardConfig.name:
            raise ConfigError(
                f"{prefix}name={self.name!r} has no effect, because {prefix}weights contains only {', '.join(self.weights)}: add "
                f"{prefix}weights.{ROW}, the weight of a row's own reward or of {prefix}name, or remove {prefix}name"
            )

    def _check_remote(self, prefix: str) -> None:
        if self.remote_url is not None:
            parts = urlsplit(self.remote_url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"{prefix}remote_url={self.remote_url!r} is not a URL: write http://host:port/path")
            return
        remote_names = [name for name in (self.name, *self.weights) if split_prefix(name)[1] == REMOTE]
        if remote_names:
            raise ConfigError(
                f"reward {remote_names[0]!r} calls a reward server: set {prefix}remote_url=http://host:port/path"
            )


@dataclass(kw_only=True)
class DataConfig(Config):
    """Training prompts, in slime's format."""

    train: str = key(MISSING, "jsonl or parquet file of prompts, with an optional slice: path@[a:b].")
    source: str = key(
        "file", "Data source: a name registered in DATA_SOURCES, or an import path such as my_pkg.my_mod:MySource."
    )
    input_key: str = key("prompt", "Column of the prompt (a string or chat messages); a.b is field b of column a.")
    label_key: str = key("label", "Column of the label, such as label or reward_model.ground_truth.")
    metadata_key: str = key("metadata", "Column of the metadata.")
    apply_chat_template: bool = key(
        False, "Render string prompts as a user turn with the tokenizer's chat template (messages are always rendered)."
    )
    chat_template_kwargs: dict[str, Any] = key({}, "Keyword arguments of the chat template.")
    conversation: str = key(
        "turns",
        "With algo=sft, tokenization of chat messages that end with an assistant turn. turns: each message separately; "
        "whole: all messages in one call of the chat template (ChatML templates). Assistant turns are trained on unless they "
        "have step_loss_mask=0.",
        choices=("turns", "whole"),
    )
    max_prompt_len: int | None = key(
        None,
        "Maximum prompt length in tokens; rows with longer prompts are bad rows. null: the context length is the limit.",
    )
    shuffle: bool = key(True, "Shuffle in a new order every epoch (slime: --rollout-shuffle).")
    on_bad_row: str = key(
        "stop",
        "Handling of an unusable row: stop the run at load, or skip and count the row.",
        choices=("stop", "skip"),
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "max_prompt_len")


@dataclass(kw_only=True)
class EvalConfig(Config):
    """Held-out prompts and their sampling."""

    datasets: dict[str, str] = key(
        {}, "Files of held-out prompts by name, with an optional slice; metrics are named eval/<name>..."
    )
    interval: int | None = key(
        None, "Evaluate every N rollouts; null: only before the first and after the last rollout."
    )
    before_train: bool = key(True, "Evaluate before the first rollout (slime: --skip-eval-before-train sets false).")
    n_samples_per_prompt: int = key(1, "Samples per held-out prompt.")
    temperature: float = key(0.0, "Sampling temperature; 0: greedy.")
    top_p: float = key(1.0, "Nucleus sampling; 1: off.")
    top_k: int = key(-1, "Top-k sampling; -1: all.")
    max_response_len: int | None = key(None, "Maximum response length in tokens; null: rollout.max_response_len.")
    save_answers: bool = key(True, "Write every response with its score to run.dir/eval/step_<N>.jsonl.")
    overrides: dict[str, Any] = key(
        {},
        "Settings of single datasets, by name: n_samples_per_prompt, temperature, top_p, top_k, max_response_len, rm_type, "
        "input_key, label_key, metadata_key, apply_chat_template.",
    )

    def check(self, prefix: str) -> None:
        super().check(prefix)
        positive(prefix, self, "interval", "n_samples_per_prompt", "max_response_len")
        within(prefix, self, 0.0, 10.0, "temperature")
        within(prefix, self, 0.0, 1.0, "top_p")
        within(prefix, self, -1, 1e9, "top_k")
