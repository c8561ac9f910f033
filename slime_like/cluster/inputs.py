"""Everything a run reads, read and checked in the driver before any process starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.crash import one_line
from slime_like.cluster.plan import Plan
from slime_like.config import names
from slime_like.config.root import TrainConfig
from slime_like.data.demonstrations import Demonstrations
from slime_like.data.dump import rollout_path
from slime_like.data.heldout import EvalSet, eval_sets
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.data.rows import any_row
from slime_like.data.tokenizer import open_tokenizer
from slime_like.errors import CheckpointError, ConfigError, DataError
from slime_like.registry import resolve
from slime_like.reward.check import check_reward, label_rule, row_rule
from slime_like.types import Prompt

TRAIN = "data.train"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Prompts, held-out prompts and tokenizer; sources are None where the mode reads none."""

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    source: Any = None  # DataSource, or Demonstrations for supervised fine-tuning
    heldout: Mapping[str, Sequence[Prompt]] = field(default_factory=dict[str, Sequence[Prompt]])


def load_inputs(cfg: TrainConfig, plan: Plan) -> Inputs:
    """Read tokenizer and datasets. Raises ``ConfigError`` or ``DataError`` naming key or file, value and fix."""
    tokenizer = load_tokenizer(cfg.model.hf_checkpoint)
    stops = stop_tokens(cfg, tokenizer)
    if cfg.run.replay_from is not None:
        _check_dumps(cfg, Path(cfg.run.replay_from))
        return Inputs(tokenizer, stops)
    check_reward(cfg.reward)
    supervised = not plan.needs_engines
    needs_label = _always if supervised else label_rule(cfg.reward)

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
        )

    factory: Any = resolve("data.source", cfg.data.source, names.DATA_SOURCES)
    train = factory(cfg.data, context(cfg.data.train, "train", TRAIN))
    if supervised:
        train = Demonstrations(train, tokenizer, plan.max_context_len)
    heldout = {
        found.name: _heldout(cfg, found, context(found.path, found.name, f"evaluation.datasets.{found.name}"))
        for found in eval_sets(cfg.evaluation)
    }
    return Inputs(tokenizer, stops, train, heldout)


def _heldout(cfg: TrainConfig, chosen: EvalSet, context: SourceContext) -> tuple[Prompt, ...]:
    """All prompts of a held-out set, its columns named as its own settings say, or else as those of the training data."""
    return FileSource(chosen.columns(cfg.data), replace(context, rm_type=chosen.rm_type)).prompts


def _check_dumps(cfg: TrainConfig, folder: Path) -> None:
    missing = [k for k in range(cfg.loop.num_rollout) if not rollout_path(folder, k).exists()]
    if missing:
        raise DataError(
            f"run.replay_from={str(folder)!r} lacks {rollout_path(folder, missing[0]).name}: loop.num_rollout is "
            f"{cfg.loop.num_rollout}, the folder holds {cfg.loop.num_rollout - len(missing)} of them; lower loop.num_rollout"
        )


def _always(rm_type: str | None) -> bool:
    """Supervised fine-tuning trains on the label."""
    del rm_type
    return True


def load_tokenizer(folder: str) -> Any:
    """The HF tokenizer of a checkpoint folder."""
    try:
        return open_tokenizer(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.hf_checkpoint={folder!r}: its tokenizer cannot be loaded ({one_line(error)}); copy the tokenizer files there"
        ) from error


def stop_tokens(cfg: TrainConfig, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's EOS, the checkpoint's, and the user's."""
    found = set(cfg.rollout.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    for name in ("generation_config.json", "config.json"):
        path = Path(cfg.model.hf_checkpoint) / name
        if path.exists():
            try:
                eos = json.loads(path.read_text()).get("eos_token_id")
            except ValueError as error:
                raise CheckpointError(f"{path} is not JSON ({error}): copy it again") from error
            found.update([eos] if isinstance(eos, int) else eos or [])
    return tuple(sorted(found))
