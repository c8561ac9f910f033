"""The user's functions of a run: where they are defined, and keys of ``algo`` that they leave without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from slime_like.config.rules.names import user_functions
from slime_like.config.schema.base import default_of
from slime_like.config.schema.known import format_value
from slime_like.config.schema.root import TrainConfig
from slime_like.registry import resolve
from slime_like.util.code_names import READS_ALL, names_in_code
from slime_like.util.user_code import source_place

CORRECTION_KEYS = ("use_tis", "use_mis", "rejection")
LOSS_KEYS = (
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "entropy_coef",
    "kl_loss_coef",
    "kl_loss_type",
    "use_rollout_logprobs",
    "off_policy",
    *CORRECTION_KEYS,
)
TOKEN_ADVANTAGE_KEYS = (
    "gamma",
    "lambd",
    "kl_coef",
    "kl_reward_type",
    "normalize_advantages",
    "opd_kl_coef",
    "reward_coef",
)
APPLIED_BY = {
    "algo.loss": LOSS_KEYS,
    "algo.off_policy": CORRECTION_KEYS,
    "algo.token_advantage": TOKEN_ADVANTAGE_KEYS,
}
"""Key of a part of the algorithm -> keys of ``algo`` that only this part applies."""


def code_rows(cfg: TrainConfig) -> list[tuple[str, str, str]]:
    """Return config key, name and source location of each function of the user. ``run.prepare`` is not imported."""
    rows: list[tuple[str, str, str]] = []
    for key, name, table in user_functions(cfg):
        if key == "run.prepare":
            file = name.rpartition(":")[0]
            place = file if file.endswith(".py") else "imported when it is called"
        else:
            place = source_place(resolve(key, name, table)) or "no Python source"
        rows.append((key, name, place))
    return rows


def unread_keys(cfg: TrainConfig) -> tuple[str, ...]:
    """Return one sentence for each user function that leaves keys of ``algo`` without effect.

    The sentence names the keys that only this function could apply, that its code does not read, and whose values differ from
    the algorithm's defaults. The code is searched, not run: if it passes the config to an installed library, the keys that
    this library reads are reported, too.
    """
    names = {key: _names_of(key, name, table) for key, name, table in user_functions(cfg) if key in APPLIED_BY}
    loss_names = names.get("algo.loss")
    applies_correction = loss_names is None or "off_policy" in loss_names or bool(READS_ALL & loss_names)
    advice: list[str] = []
    for key, name, _ in user_functions(cfg):
        if key not in names or READS_ALL & names[key]:
            continue
        keys = [part for part in APPLIED_BY[key] if part not in names[key]]
        if key == "algo.loss" and applies_correction:
            keys = [part for part in keys if part not in CORRECTION_KEYS]
        if key == "algo.off_policy" and not applies_correction:
            continue  # reported for the loss
        if changed_keys := list(_changed_keys(cfg, keys)):
            advice.append(_sentence(key, name, changed_keys))
    return tuple(advice)


def _names_of(key: str, name: str, table: dict[str, str]) -> frozenset[str]:
    return names_in_code(resolve(key, name, table))


def _changed_keys(cfg: TrainConfig, keys: Sequence[str]) -> Iterator[tuple[str, object, object]]:
    """Yield (key, value, default) for each of ``keys`` whose value is not the default of the algorithm."""
    for item in fields(cfg.algo):
        value, default = getattr(cfg.algo, item.name), default_of(item)
        if item.name in keys and value != default:
            yield f"algo.{item.name}", value, default


def _sentence(key: str, name: str, changed_keys: Sequence[tuple[str, object, object]]) -> str:
    values = ", ".join(f"{part}={format_value(value)}" for part, value, _ in changed_keys)
    defaults = " ".join(f"{part}={format_value(default)}" for part, _, default in changed_keys)
    verb, pronoun = ("has", "it") if len(changed_keys) == 1 else ("have", "them")
    return (
        f"{values} probably {verb} no effect: no code of {key}={name} reads {pronoun}; apply {pronoun} there "
        f"(docs/extending.md), or set {defaults}"
    )
