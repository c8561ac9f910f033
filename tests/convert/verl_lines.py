"""Translation of one line of a verl job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_like.config.load.loader import read_override
from slime_like_compat.conversion_rows import BLOCKING, Mapped, Row, refusal_message
from slime_like_compat.verl.job import Job, Setting
from slime_like_compat.verl.mapping import map_settings, setting_of_text, translate_settings

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
C = "algorithm.rollout_correction"
NEEDED = (
    "algorithm.adv_estimator=grpo data.train_files=d.parquet actor_rollout_ref.model.path=m data.train_batch_size=64 "
    f"{A}.ppo_mini_batch_size=16 {R}.n=4 trainer.total_training_steps=10"
)
REWARD = "reward.name=math"
_KWARGS = "reward.reward_kwargs"
OVERLONG = (
    f"reward.reward_manager.name=dapo {_KWARGS}.max_resp_len=512 {_KWARGS}.overlong_buffer_cfg.enable=True "
    f"{_KWARGS}.overlong_buffer_cfg.len=64 {_KWARGS}.overlong_buffer_cfg.penalty_factor=0.5"
)
FILTER, METRIC = "algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric"


def settings_of(line: str) -> list[Setting]:
    return [setting_of_text(text, "run.sh:1") for text in f"{NEEDED} {line}".split()]


def translated(line: str, *, user_overrides: Sequence[str] = (REWARD,), drop: Sequence[str] = ()) -> Job:
    return translate_settings(settings_of(line), user_overrides=user_overrides, drop=drop)


def mapped(line: str) -> Mapped:
    return map_settings(settings_of(line), run_name="a", user_overrides=[REWARD])


def refusals(rows: Sequence[Row]) -> str:
    blocking = [row for row in rows if row.verdict in BLOCKING]
    return refusal_message(blocking) if blocking else ""


def value(job: Job, key: str) -> Any:
    """Return the key's value in the recipe, or its default."""
    if key == "evaluation.datasets" and not any(name.startswith(key) for name in job.overrides):
        return {}
    if key == "algo.name":
        return job.algo
    overrides_of_key = {name: text for name, text in job.overrides.items() if name == key or name.startswith(f"{key}.")}
    if list(overrides_of_key) != [key] and overrides_of_key:
        return {name[len(key) + 1 :]: read_override(f"{name}={text}")[1] for name, text in overrides_of_key.items()}
    return read_override(f"{key}={overrides_of_key[key]}")[1] if overrides_of_key else job.default(key)
