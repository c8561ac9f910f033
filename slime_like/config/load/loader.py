"""Load a checked and sealed ``TrainConfig`` from the command line. Only this file imports hydra."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from slime_like.config.load.compat import flag_of, translate
from slime_like.config.load.explain import explain
from slime_like.config.load.paths import config_folder
from slime_like.config.load.recipe_edits import RECIPE, config_files, configs_without
from slime_like.config.rules.epochs import resolve_epochs
from slime_like.config.rules.files import check_files
from slime_like.config.rules.path_values import resolve_paths
from slime_like.config.rules.tree import check_rules
from slime_like.config.schema.known import ALGORITHMS, describe, free_root, is_text
from slime_like.config.schema.render import render
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.reading import YAML_ERRORS, InputFile, reason
from slime_like.util.user_module import check_exists

GROUPS = ("algo", "guard", RECIPE)
# Raised by OmegaConf on malformed trees.
UNREADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
)
_OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[A-Za-z_][\w.-]*)(=(?P<value>.*))?", re.DOTALL)


class _Overrides(NamedTuple):
    """Command-line overrides. Hydra composes the chosen config groups; the values are set on the composed tree."""

    groups: list[str]
    parsed: list[tuple[str, Any]]  # (key, value) in command-line order
    values: dict[str, str]  # key -> text on the command line, for messages
    removed: list[str]  # keys of ``~key``: their settings in recipes are ignored
    config_dir: str | None


def load_config(argv: Sequence[str], *, files: bool = True, machine: bool = True, code: bool = True) -> TrainConfig:
    """Return the checked and sealed config of ``argv`` (``key=value`` overrides, slime and Megatron flags).

    With ``files=False``, the files that the config names are not read, except user code. Call ``check_files`` once they exist;
    if loop.num_epoch is set, call this function again instead, because loop.num_rollout is computed from data.train. With
    ``machine=False``, packages, environment variables and the file of ``run.prepare`` on this machine are not checked,
    because the run is for another machine. With ``code=False``, functions named by an import path are not imported, and the
    file of ``run.prepare`` may be missing. Raises ``ConfigError`` (``CheckpointError`` or ``DataError`` for files) naming the
    key, the value and a fix if the config is invalid.
    """
    overrides = _sort(argv)
    cfg = _finish(_compose(overrides), overrides.values, files=files, machine=machine, code=code)
    if code and machine and cfg.run.prepare is not None:
        check_exists("run.prepare", cfg.run.prepare)
    return cfg


def unchecked_config(argv: Sequence[str]) -> TrainConfig:
    """Return the config of ``argv``, neither checked by the rules nor sealed (made read-only).

    Raises ``ConfigError`` if an argument is malformed, the config cannot be composed or a required key is missing.
    """
    overrides = _sort(argv)
    return _values(_compose(overrides), overrides.values)


def read_override(text: str) -> tuple[str, Any]:
    """Return the key and value of ``key=value`` in Hydra's grammar, without a leading ``+`` or ``++``.

    Raises ``ConfigError`` if Hydra cannot parse the text, and on ``~key`` and sweeps, which do not set one value.
    """
    try:
        parsed = _parser().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{text} cannot be read as key=value in Hydra's grammar: quote the value") from error
    if parsed.is_delete() or parsed.is_sweep_override():
        raise ConfigError(f"{text} sets no value: write key=value")
    return parsed.get_key_element().lstrip("+"), parsed.value()


def show(argv: Sequence[str]) -> str:
    """Return the config tree of ``argv`` as YAML, with ``???`` for required keys that are missing.

    Raises ``ConfigError`` if an argument is malformed or the config cannot be composed.
    """
    return OmegaConf.to_yaml(_compose(_sort(argv)))


def to_yaml(cfg: TrainConfig) -> str:
    """Return every key of ``cfg`` as YAML; ``from_yaml`` reads it back."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False, allow_unicode=True)


def read_config(path: Path) -> TrainConfig:
    """Return the checked and sealed config that a run wrote to ``path``. The user's functions that it names are imported.

    Raises ``ConfigError`` naming the file if it is unreadable or not valid.
    """
    fix = "restore it, or move it away to continue without comparing settings with the earlier run"
    file = InputFile(path, ConfigError, fix)
    text = file.text()
    try:
        return from_yaml(text)
    except ConfigError as error:
        raise file.refused(f"cannot be used: {error}") from error


def from_yaml(text: str, *, files: bool = False) -> TrainConfig:
    """Return the checked and sealed config that ``to_yaml`` wrote. The user's functions that it names are imported.

    Raises ``ConfigError`` if the text is not YAML, does not fit the schema or breaks a rule. With ``files``, the files that the
    config names are checked too, and the errors of ``check_files`` are raised.
    """
    try:
        tree = cast("dict[str, Any]", yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise explain(error, {}, None) from error
    except YAML_ERRORS as error:
        raise ConfigError(f"not valid YAML: {reason(error)}") from error
    return _finish(_with_defaults(tree), {}, files=files)


def saved_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's saved settings with defaults for newer keys, without importing the functions that they name.

    Raises ``ConfigError`` if ``tree`` has no known algo.name, an unknown key or a value of a wrong type. No rule is checked.
    """
    return cast("dict[str, Any]", OmegaConf.to_container(_with_defaults(tree)))


def _with_defaults(tree: Any) -> DictConfig:
    try:
        algo = str(tree["algo"]["name"])
    except (TypeError, LookupError, AttributeError) as error:
        raise ConfigError("the saved configuration has no algo.name: was it written by a run of slime_like?") from error
    if algo not in ALGORITHMS:
        raise ConfigError(f"algo.name={algo!r} in the saved configuration is not one of {', '.join(ALGORITHMS)}")
    try:
        return cast("DictConfig", OmegaConf.merge(_schema(algo), tree))  # merges into a copy
    except (OmegaConfBaseException, *UNREADABLE) as error:
        raise explain(error, {}, algo) from error


@functools.cache
def _schema(algo: str) -> DictConfig:
    return OmegaConf.structured(TrainConfig(algo=ALGORITHMS[algo]()))


def _values(tree: DictConfig, values: dict[str, str]) -> TrainConfig:
    try:
        return cast("TrainConfig", OmegaConf.to_object(tree))
    except MissingMandatoryValue as error:
        missing = sorted(OmegaConf.missing_keys(tree))
        text = "; ".join(_missing(key) for key in missing)
        raise ConfigError(f"{text}. +recipe=quickstart is a complete run") from error
    except OmegaConfBaseException as error:
        raise explain(error, values, _algo(tree)) from error


def _finish(
    tree: DictConfig, values: dict[str, str], *, files: bool, machine: bool = True, code: bool = True
) -> TrainConfig:
    cfg = _values(tree, values)
    resolve_paths(cfg)
    cfg.check("")
    if cfg.loop.num_epoch is not None and "loop.num_rollout" in values:  # values of recipes are not in ``values``
        raise ConfigError(
            f"loop.num_epoch={cfg.loop.num_epoch} and loop.num_rollout={values['loop.num_rollout']}: both set the number of "
            "rollouts; set loop.num_epoch=null or remove loop.num_rollout"
        )
    if files:
        resolve_epochs(cfg)
    check_rules(cfg, machine=machine, code=code, num_rollout_known=files or cfg.loop.num_epoch is None)
    if files:
        check_files(cfg)
    cfg.seal()
    return cfg


def _missing(key: str) -> str:
    flag = flag_of(key)
    also = f" or {flag} ..." if flag else ""
    return f"{key} must be given: {key}=...{also}: {describe(key)}"


def _algo(tree: DictConfig) -> str | None:
    schema = OmegaConf.get_type(tree, "algo")
    return next((name for name, candidate in ALGORITHMS.items() if candidate is schema), None)


def _compose(overrides: _Overrides) -> DictConfig:
    files = _config_files(overrides)
    try:
        tree = _compose_groups(overrides, files)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, *UNREADABLE) as error:
        chosen = next((group.partition("=")[2] for group in overrides.groups if group.startswith("algo=")), None)
        raise explain(error, overrides.values, chosen, files=files) from error
    for key, value in overrides.parsed:
        free = bool(free_root(key))
        try:
            OmegaConf.update(tree, key, value, merge=not free, force_add=free)
        except (OmegaConfBaseException, *UNREADABLE) as error:
            raise explain(error, overrides.values, _algo(tree), key) from error
    return tree


def _compose_groups(overrides: _Overrides, files: Mapping[str, Path | None]) -> DictConfig:
    groups, configs = tuple(overrides.groups), config_folder()
    folders: list[Path] = []
    if overrides.config_dir is not None:
        folder = Path(overrides.config_dir).resolve()
        if not folder.is_dir():
            raise ConfigError(
                f"--config-dir {overrides.config_dir}: there is no folder {folder}; put recipes in DIR/recipe"
            )
        folders.append(folder)
    if overrides.removed:
        with configs_without(configs, files, overrides.removed) as edited:
            return _hydra(edited, groups, [configs, *folders])
    return _hydra(configs, groups, folders) if folders else _copy(_compose_shipped(configs, groups))


def _chosen(overrides: _Overrides) -> list[dict[str, str | list[str]]]:
    """Return Hydra's defaults list for the configs that the command line chooses.

    Raises ``ConfigError`` on a value that is neither a name nor, for recipes, a list of names.
    """
    return [
        {key.lstrip("+"): _names(key, value)} for key, _, value in (text.partition("=") for text in overrides.groups)
    ]


def _names(key: str, text: str) -> str | list[str]:
    """Parse ``text``, the value of the config group ``key``. Return a name or, if recipes are listed, the list of names.

    Raises ``ConfigError`` on any other value.
    """
    try:
        override = _parser().parse_override(f"{key}={text}")
        value: Any = None if override.is_sweep_override() else override.value()
    except HydraException:
        value = None
    if isinstance(value, str):
        return value
    is_recipe = key.lstrip("+") == RECIPE
    if is_recipe and isinstance(value, list) and all(isinstance(name, str) for name in cast("list[Any]", value)):
        return cast("list[str]", value)
    names = f", or {key}=[NAME,NAME] for several recipes" * is_recipe
    raise ConfigError(f"{key}={text} is not a name: write {key}=NAME{names}")


def _copy(tree: DictConfig) -> DictConfig:
    """Return a deep copy, so that setting values leaves the cached composition unchanged."""
    return copy.deepcopy(tree)


@functools.cache  # a composition takes 0.2 s; the files of the package do not change
def _compose_shipped(folder: Path, groups: tuple[str, ...]) -> DictConfig:
    return _hydra(folder, groups)


def _hydra(folder: Path, overrides: Sequence[str], searchpath: Sequence[Path] = ()) -> DictConfig:
    """Compose the config of ``folder``. Files that it lacks are read from the folders of ``searchpath``."""
    _register()
    if searchpath:
        places = ",".join(render(f"file://{place}") for place in searchpath)
        overrides = [f"hydra.searchpath=[{places}]", *overrides]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def _config_files(overrides: _Overrides) -> dict[str, Path | None]:
    """Return the files of the chosen configs and of those that they include.

    Raises ``ConfigError`` as ``_chosen`` does, and on an unreadable recipe or other config, because Hydra's error would not
    name the file.
    """
    folders = [config_folder(), *([Path(overrides.config_dir).resolve()] if overrides.config_dir else [])]
    return config_files(folders, _chosen(overrides))


@functools.cache
def _register() -> None:
    """Register the schemas with Hydra, once per process."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=TrainConfig, provider="slime_like")
    for name, schema in ALGORITHMS.items():
        store.store(group="algo", name=name, node=schema(name=name), provider="slime_like")


def _sort(argv: Sequence[str]) -> _Overrides:
    command = translate(argv)
    result = _Overrides([], [], {}, [], command.config_dir)
    for text in command.overrides:
        match = _OVERRIDE.fullmatch(text)
        if match is not None and match["mark"] == "~":
            result.removed.append(_removed_key(text, match["key"]))
            continue
        if match is None or match["value"] is None:
            raise ConfigError(
                f"{text!r} is not an override: write key=value or --flag value (python train.py --help lists them)"
            )
        key, value = match["key"], match["value"]
        result.values[key] = value
        if key == "hydra" or key.startswith("hydra."):
            raise ConfigError(
                f"{text}: Hydra's own settings have no effect here; --config-dir adds a folder of recipes"
            )
        if key in GROUPS:
            result.groups.append(f"{'+' if key == RECIPE else ''}{key}={value}")
        else:
            result.parsed.append((key, _parse(key, value)))
    return result


def _removed_key(text: str, key: str) -> str:
    """Return ``key``, which the override ``text`` removes.

    Raises ``ConfigError`` if ``text`` is not exactly ``~key``, or if ``key`` is a config group.
    """
    if text != f"~{key}":
        raise ConfigError(
            f"{text}: write '~{key}', which ignores the setting of a recipe, or set {key} to another value"
        )
    if key in GROUPS:
        raise ConfigError(f"{text}: {key} cannot be removed; choose another one with {key}=NAME")
    return key


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _parse(key: str, value: str) -> Any:
    """Parse ``value`` in Hydra's grammar. Raises ``ConfigError`` on invalid text and on sweeps.

    If ``key`` holds text, an unquoted value other than null is the text itself.
    """
    text = f"{key}={_quote(value) if is_text(key) else value}"
    try:
        parsed = _parser().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"{key}={value} cannot be read: quote the value, as in {key}=\"'...'\"") from error
    if parsed.is_sweep_override():
        raise ConfigError(f"{key}={value} reads as several values: write a list as {key}=[{value}] or quote the value")
    return parsed.value()


def _quote(value: str) -> str:
    """Return ``value`` as a quoted Hydra string; quoted values and null are unchanged."""
    quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
    return value if quoted or value.lower() == "null" else render(value)
