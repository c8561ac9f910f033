"""Inputs of a run, read and checked in the driver before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.planner import Plan
from slime_like.config.rules.hf import HfConfig, downloaded_file, read_hf_config
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.data.conversations import Conversations
from slime_like.data.demonstrations import Demonstrations
from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.heldout import EvalSet, eval_sets
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.data.routing import RoutingShape, check_dumped
from slime_like.data.rows import any_row
from slime_like.data.tokenizer import open_tokenizer
from slime_like.data.user_source import open_rows, open_source
from slime_like.errors import DataError
from slime_like.reward.check import check_reward, label_rule, row_rule
from slime_like.types import Prompt
from slime_like.util.reading import Count

TRAIN = "data.train"
_NO_END = (
    "no token ends a response: the tokenizer, generation_config.json and config.json of model.hf_checkpoint={folder!r} name "
    "no eos_token_id, so every response would have rollout.max_response_len tokens; set rollout.stop_token_ids"
)


@dataclass(frozen=True, slots=True)
class _Stops:
    """Form of the EOS tokens in generation_config.json and config.json."""

    eos_token_id: Count | list[Count] | None


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Prompts, held-out prompts and tokenizer; ``source`` is None if the run replays dumped rollouts."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    source: Any = None  # DataSource, or Demonstrations for supervised fine-tuning
    heldout: Mapping[str, Sequence[Prompt]] = field(default_factory=dict[str, Sequence[Prompt]])
    routing: RoutingShape | None = None  # shape of the routed experts to be replayed; None if engines return none
    advice: tuple[str, ...] = ()  # valid but probably unintended settings


def load_inputs(cfg: TrainConfig, plan: Plan) -> RunInputs:
    """Read tokenizer and datasets.

    Raises ``ConfigError`` if a setting or the tokenizer cannot be used, ``CheckpointError`` if config.json or
    generation_config.json cannot be used, and ``DataError`` if a dataset, a dumped rollout or an EOS token cannot be used.
    """
    tokenizer = open_tokenizer(cfg.model.hf_checkpoint)
    model = read_hf_config("model.hf_checkpoint", cfg.model.hf_checkpoint)
    vocab_size, routing = model.vocab_size, routing_shape(cfg, model)
    stops = stop_tokens(cfg, tokenizer, vocab_size)
    if cfg.run.replay_from is not None:
        _check_dumps(cfg, Path(cfg.run.replay_from), routing)
        return RunInputs(tokenizer, stops, routing=routing)
    check_reward(cfg.reward)
    supervised = not plan.needs_engines
    needs_label = _every_row_needs_label if supervised else label_rule(cfg.reward)
    num_started = cfg.rollout.over_sampling_batch_size or cfg.rollout.batch_size

    def context(path: str, dataset: str, key: str) -> SourceContext:
        return SourceContext(
            path=path,
            tokenizer=tokenizer,
            max_context_len=plan.max_context_len,
            needs_label=needs_label,
            row_problem=any_row if supervised else row_rule(cfg.reward),
            seed=cfg.run.seed,
            shuffle=cfg.data.shuffle and key == TRAIN,
            dataset=dataset,
            key=key,
            vocab_size=vocab_size,
            supervised=supervised,
            batch_size=num_started,
            max_prompts=num_started * (1 + cfg.rollout.max_refills),
        )

    train_context = context(cfg.data.train, "train", TRAIN)
    if supervised:
        conversations = Conversations(tokenizer, cfg.data.conversation, cfg.data.chat_template_kwargs)
        train = Demonstrations(open_rows(cfg.data, train_context), tokenizer, plan.max_context_len, conversations)
    else:
        train = open_source(cfg.data, train_context)
    heldout = {
        dataset.name: _heldout(cfg, dataset, context(dataset.path, dataset.name, f"evaluation.datasets.{dataset.name}"))
        for dataset in eval_sets(cfg.evaluation)
    }
    advice = () if stops or supervised else (_NO_END.format(folder=cfg.model.hf_checkpoint),)
    return RunInputs(tokenizer, stops, train, heldout, routing, advice)


def routing_shape(cfg: TrainConfig, model: HfConfig) -> RoutingShape | None:
    """Return the shape of the routed experts that engines return and the trainer replays.

    Return None unless ``algo.routing_replay=rollout``.
    """
    if not isinstance(cfg.algo, PolicyConfig) or cfg.algo.routing_replay != "rollout":
        return None
    return RoutingShape(model.num_layers, model.experts_per_token, model.num_experts, model.sparse_layers)


def _heldout(cfg: TrainConfig, dataset: EvalSet, context: SourceContext) -> tuple[Prompt, ...]:
    """Return all prompts of a held-out set; its column names default to those of the training data."""
    return FileSource(dataset.columns(cfg.data), replace(context, rm_type=dataset.rm_type)).prompts


def _check_dumps(cfg: TrainConfig, folder: Path, routing: RoutingShape | None) -> None:
    missing = [k for k in range(cfg.loop.num_rollout) if not rollout_path(folder, k).exists()]
    if missing:
        raise DataError(
            f"run.replay_from={str(folder)!r} lacks {rollout_path(folder, missing[0]).name}: loop.num_rollout is "
            f"{cfg.loop.num_rollout}, but the folder has only {cfg.loop.num_rollout - len(missing)} of these rollouts; lower loop.num_rollout"
        )
    for k in range(cfg.loop.num_rollout):
        path = rollout_path(folder, k)
        groups = load_groups(path)
        if routing is not None:
            check_dumped(groups, routing, f"run.replay_from={str(folder)!r}: {path.name}")


def _every_row_needs_label(rm_type: str | None) -> bool:
    """Return True: supervised fine-tuning trains on the label of each row."""
    del rm_type
    return True


def stop_tokens(cfg: TrainConfig, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end a response: EOS tokens of tokenizer and checkpoint, and ``rollout.stop_token_ids``.

    Raises ``DataError`` if one of the EOS tokens is outside the vocabulary (no response could end with it), and
    ``CheckpointError`` if generation_config.json or config.json cannot be used.
    """
    folder = Path(cfg.model.hf_checkpoint)
    ends: dict[str, list[int]] = {}
    if tokenizer.eos_token_id is not None:
        ends["tokenizer"] = [int(tokenizer.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            file = downloaded_file("model.hf_checkpoint", folder / name)
            eos = file.typed({"eos_token_id": file.json_object().get("eos_token_id")}, _Stops).eos_token_id
            ends[name] = [eos] if isinstance(eos, int) else eos or []
    for name, tokens in ends.items():
        if beyond := next((token for token in tokens if token >= vocab_size), None):
            raise DataError(
                f"model.hf_checkpoint={str(folder)!r}: its {name} ends responses with token {beyond}, and the vocabulary of "
                f"its config.json ends at {vocab_size - 1}: no response could end with it; correct eos_token_id or vocab_size"
            )
    return tuple(sorted({*cfg.rollout.stop_token_ids, *(token for tokens in ends.values() for token in tokens)}))
