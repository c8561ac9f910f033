"""Rules for ``algo``: the algorithm, its loss and its advantages must fit each other."""

from __future__ import annotations

from slime_like.config.schema import names
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.known import ALGORITHMS
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.config.schema.role_algo import DistillConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.registry import is_path, is_user_code, not_one_of, own_entry

LOSS_SCHEMAS: dict[str, type[AlgoConfig]] = {
    "policy_gradient": PolicyGradientConfig,
    "gspo": PolicyGradientConfig,
    "cispo": PolicyConfig,
}
"""Loss of table LOSSES -> base of the schemas whose keys it reads; other losses read keys of ``AlgoConfig``."""


def check_algorithm(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if a component of ``cfg.algo`` or another key does not fit the algorithm.

    The other keys are the number of samples per prompt and, for SFT, the evaluation datasets. An ``algo.name`` that differs
    from the chosen algorithm is an error too.
    """
    algo = cfg.algo
    algorithm = next(name for name, schema in ALGORITHMS.items() if type(algo) is schema)
    if algo.name != algorithm:
        fix = f"choose the algorithm with algo={algo.name}"
        if algo.name not in ALGORITHMS:
            problem = not_one_of(algo.name, ALGORITHMS)
            fix = (
                f"remove it, and choose the algorithm with algo=NAME; {algo.name!r} {problem}{own_entry('ALGORITHMS')}"
            )
        raise ConfigError(f"algo.name={algo.name!r} cannot be set: {fix}")
    _check_schema(algo, algorithm)
    _check_components(algo, algorithm)
    n = cfg.rollout.n_samples_per_prompt
    if isinstance(algo, SftConfig):
        if n != 1:
            raise ConfigError(
                f"rollout.n_samples_per_prompt={n} with algo=sft: a row has one label; set rollout.n_samples_per_prompt=1"
            )
        if cfg.evaluation.datasets:
            raise ConfigError("evaluation.datasets with algo=sft: no engine runs; set evaluation.datasets={}")
        return
    is_user_function = is_user_code(algo.group_advantage, names.GROUP_ADVANTAGES)
    if algo.group_advantage is not None and not is_user_function and n < 2 and cfg.run.mode != "rollout_only":
        raise ConfigError(
            f"rollout.n_samples_per_prompt={n} with algo.group_advantage={algo.group_advantage}: every advantage "
            "would be 0, because a sample would be its own baseline; set rollout.n_samples_per_prompt to at least 2, or set "
            "algo=reinforce_pp"
        )


def _check_schema(algo: AlgoConfig, algorithm: str) -> None:
    """Raise ``ConfigError`` if the schema of ``algorithm`` lacks something that its loss needs.

    The schema must have the keys that the loss reads. If the loss weights tokens by an advantage, the schema must name an
    advantage, unless ``algo`` sets token_advantage.
    """
    schema, default = names.ALGORITHMS[algorithm], ALGORITHMS[algorithm]()
    base = LOSS_SCHEMAS.get(algo.loss, AlgoConfig)
    if not isinstance(algo, base) and algo.loss == default.loss:
        raise ConfigError(
            f"algo={algorithm}: the schema {schema} has loss={algo.loss!r}, which reads keys of {base.__name__}: derive the "
            f"schema from {base.__name__}, or give it another loss (docs/extending.md, Algorithm)"
        )
    has_advantage = default.group_advantage or default.token_advantage or algo.token_advantage
    if isinstance(algo, PolicyConfig) and not has_advantage:
        raise ConfigError(
            f"algo={algorithm}: the schema {schema} has neither group_advantage nor token_advantage, by which the loss weights "
            "tokens: set group_advantage or token_advantage in the schema (docs/extending.md, Algorithm)"
        )


def _check_components(algo: AlgoConfig, algorithm: str) -> None:
    """Raise ``ConfigError`` unless the loss and the token advantage are the algorithm's own or fit any algorithm.

    Functions of another algorithm would read keys that ``algo`` lacks. A user's token advantage requires a
    ``PolicyConfig``. A group advantage must be set if the algorithm has one by default, and must not be set otherwise;
    distillation may have one.
    """
    default = ALGORITHMS[algorithm]()
    if algo.loss != default.loss and not _fits_any_algorithm("loss", algo.loss, names.LOSSES):
        raise ConfigError(
            f"algo.loss={algo.loss!r} under algo={algorithm}: that loss would not read the keys of algo={algorithm}; "
            f"{_algorithm_of('loss', algo.loss, names.LOSSES)}"
        )
    is_user_function = isinstance(algo, PolicyConfig) and _fits_any_algorithm(
        "token_advantage", algo.token_advantage, names.TOKEN_ADVANTAGES
    )
    if algo.token_advantage is None and default.token_advantage is not None:
        raise ConfigError(
            f"algo.token_advantage=null under algo={algorithm}, whose advantages are {default.token_advantage}: remove "
            "algo.token_advantage, or choose another algo"
        )
    if algo.token_advantage != default.token_advantage and not is_user_function:
        raise ConfigError(
            f"algo.token_advantage={algo.token_advantage!r} under algo={algorithm}: it would not read the keys of "
            f"algo={algorithm}; {_algorithm_of('token_advantage', algo.token_advantage, names.TOKEN_ADVANTAGES)}"
        )
    if not isinstance(algo, DistillConfig) and (algo.group_advantage is None) != (default.group_advantage is None):
        source = default.token_advantage or "none, because it learns from labels"
        fix = f"set algo.group_advantage={default.group_advantage or 'null'}"
        value = "null" if algo.group_advantage is None else repr(algo.group_advantage)
        raise ConfigError(
            f"algo.group_advantage={value} under algo={algorithm}, whose advantages are "
            f"{default.group_advantage or source}: {fix}, or choose another algo"
        )


def _fits_any_algorithm(key: str, name: str | None, table: dict[str, str]) -> bool:
    """Return whether ``name`` is an import path, or a user's entry in ``table`` that no algorithm has by default."""
    return is_path(name) or (is_user_code(name, table) and not _algorithms_with(key, name))


def _algorithms_with(key: str, name: str | None) -> list[str]:
    """Return the algorithms whose key ``key`` is ``name`` by default."""
    return [algorithm for algorithm, schema in ALGORITHMS.items() if getattr(schema(), key) == name]


def _algorithm_of(key: str, name: str | None, table: dict[str, str]) -> str:
    """Return the fix for a component ``name`` that belongs to another algorithm.

    The fix is to choose an algorithm that has the component. If none has it, the fix is to set the import path that
    ``table`` gives for it. If ``name`` is itself an import path, the fix is to remove the key.
    """
    if algorithms := _algorithms_with(key, name):
        return f"choose the algorithm with algo={' or '.join(algorithms)}"
    if name not in table:  # a path
        return f"remove algo.{key}, or choose another algo"
    return (
        f"no algorithm has it by default: set algo.{key}={table[name]}, or add an algorithm whose schema has {key}={name!r} "
        "(docs/extending.md, Algorithm)"
    )
