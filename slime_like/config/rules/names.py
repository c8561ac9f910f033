"""Rules for names in the config.

A name is registered in ``schema.names`` or, for some keys, is the import path of a function.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime_like.config.rules.agents import agent_function
from slime_like.config.rules.user_functions import check_bound, check_function
from slime_like.config.schema import names
from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.reward_names import ROW, check_reward_name, split_prefix
from slime_like.config.schema.root import TrainConfig
from slime_like.registry import OWN_PACKAGES, check, check_path, is_path

type NameEntry = tuple[str, str, dict[str, str]]  # key, name, table


def check_names(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` on a name that is neither registered nor, for keys that accept one, an import path."""
    for key, name, table_name in _closed_names(cfg):
        check(key, name, getattr(names, table_name), table_name=table_name)
    check_reward_name("reward.name", cfg.reward.name, dotted=True)
    for key, name, table in _open_names(cfg):
        check(key, name, table, dotted=True)
    for key, name, table in _algorithm_names(cfg):
        check(key, name, table, dotted=True)
    if cfg.run.prepare is not None:  # a path, which is imported only when it is called, because its imports may be slow
        check_path("run.prepare", cfg.run.prepare)


def check_functions(cfg: TrainConfig) -> None:
    """Import the user's functions that ``cfg`` names, except ``run.prepare``, and construct a user's loss and token advantage.

    Raises ``ConfigError`` if a function cannot be imported, has a wrong signature or returns a useless result, if a
    construction fails, or if ``reward.weights`` has an unknown name.
    """
    for key, name, table in _open_names(cfg):
        check_function(key, name, table)
    for key, name, table in _algorithm_names(cfg):
        check_bound(key, name, table, cfg.algo)
    for key, name, table in _estimator_names(cfg):
        check_function(key, name, table)
    if cfg.rollout.agent is not None:
        agent_function(cfg.rollout.agent)


def user_functions(cfg: TrainConfig) -> Iterator[NameEntry]:
    """Yield (key, name, table) for each function that is not this project's own: an import path, or an added table entry."""
    entries = [*_algorithm_names(cfg), *_estimator_names(cfg), *_open_names(cfg)]
    entries += [
        (key, path, {})
        for key, path in (("rollout.agent", cfg.rollout.agent), ("run.prepare", cfg.run.prepare))
        if path is not None
    ]
    for key, name, table in entries:
        target = table.get(name, name)
        if is_path(target) and not target.startswith(OWN_PACKAGES):
            yield key, name, table


def _closed_names(cfg: TrainConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, name, name of the table) for each model component that is not "auto". Its name must be in the table."""
    for key, name, table_name in (
        ("model.family", cfg.model.family, "FAMILIES"),
        ("model.attention", cfg.model.attention, "ATTENTIONS"),
        ("model.gdn.backend", cfg.model.gdn.backend, "GDN_BACKENDS"),
    ):
        if name != "auto":
            yield key, name, table_name


def _open_names(cfg: TrainConfig) -> Iterator[NameEntry]:
    """Yield (key, name, table) for each name outside ``algo`` that may be in ``table`` or be a function's import path.

    Raises ``ConfigError`` on an unknown name in ``reward.weights``.
    """
    yield "reward.name", split_prefix(cfg.reward.name)[1], names.REWARDS
    for name in (name for name in cfg.reward.weights if name != ROW):
        check_reward_name("reward.weights", name, dotted=True)
        yield "reward.weights", split_prefix(name)[1], names.REWARDS
    yield "rollout.generate", cfg.rollout.generate, names.GENERATE
    yield "data.source", cfg.data.source, names.DATA_SOURCES
    for name in cfg.rollout.filters:
        yield "rollout.filters", name, names.FILTERS
    for name in cfg.metrics.sinks:
        yield "metrics.sinks", name, names.SINKS


def _algorithm_names(cfg: TrainConfig) -> Iterator[NameEntry]:
    """Yield (key, name, table) for the loss, the advantages and the off-policy correction. A name may be an import path."""
    yield "algo.loss", cfg.algo.loss, names.LOSSES
    if cfg.algo.group_advantage is not None:
        yield "algo.group_advantage", cfg.algo.group_advantage, names.GROUP_ADVANTAGES
    if cfg.algo.token_advantage is not None:
        yield "algo.token_advantage", cfg.algo.token_advantage, names.TOKEN_ADVANTAGES
    if isinstance(cfg.algo, PolicyConfig):
        yield "algo.off_policy", cfg.algo.off_policy, names.OFF_POLICY


def _estimator_names(cfg: TrainConfig) -> Iterator[NameEntry]:
    """Yield (key, name, table) for each KL estimator. Its name must be in the table."""
    for key in ("kl_loss_type", "kl_reward_type"):
        if hasattr(cfg.algo, key):
            yield f"algo.{key}", getattr(cfg.algo, key), names.KL_ESTIMATORS
