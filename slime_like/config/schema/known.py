"""Known dotted keys, their types, and error messages for unknown keys."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, cast

from slime_like.config.schema import names
from slime_like.config.schema.base import MISSING, default_of, keys
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.registry import closest, resolve


def _schema(name: str) -> type[AlgoConfig]:
    """Import the schema of an algorithm. Raises ``ConfigError`` if it cannot be imported or is not a subclass of ``AlgoConfig``.

    A module given as a file is refused too: the trainer ranks import it by its name when they unpickle the config.
    """
    path = names.ALGORITHMS[name]
    file, _, attribute = path.rpartition(":")
    place = f"algo={name!r}: ALGORITHMS in slime_like/config/schema/names.py has {path!r}"
    if file.endswith(".py"):
        module = f"{Path(file).stem}:{attribute}"
        raise ConfigError(f"{place}, a file: name the module, {module!r}, and put its folder on PYTHONPATH")
    schema = resolve("algo", name, names.ALGORITHMS)
    if not (isinstance(schema, type) and issubclass(schema, AlgoConfig)):
        raise ConfigError(
            f"{place}, which is not a subclass of AlgoConfig: name a schema (docs/extending.md, Algorithm)"
        )
    return schema


ALGORITHMS: dict[str, type[AlgoConfig]] = {name: _schema(name) for name in names.ALGORITHMS}
"""``algo=<name>`` -> schema, the default first."""

MAX_SUGGESTIONS = 2  # keys of other groups with the same last word; more would be a guess

TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list[str]": "a list such as [a,b]",
    "list[int]": "a list such as [1,2]",
    "dict[str, Any]": "a mapping such as {name: value}",
    "dict[str, float]": r"a mapping such as {name: 0.5, my_package.my_module\:function: 0.1}",
    "dict[str, str]": "a mapping such as {name: value}",
}


@functools.cache
def known_keys(algo: str | None = None) -> dict[str, Field[Any]]:
    """Return a dict from all dotted config keys to dataclass fields.

    The algo.* keys are those of ``algo``, or of all algorithms if ``algo`` is None. If several algorithms have a key, the
    field of the first of them is used; the default algorithm comes first.
    """
    fields_by_key = {name: item for name, item in keys(TrainConfig) if name != "algo"}
    for name in ALGORITHMS if algo is None else [algo]:
        for key, item in keys(ALGORITHMS[name], "algo."):
            fields_by_key.setdefault(key, item)
    return fields_by_key


def type_of(item: Field[Any]) -> str:
    """Return the field's annotation as written, such as ``int | None``."""
    if isinstance(item.type, str):
        return item.type
    # Without "from __future__ import annotations" annotations are types; generics and unions print as they are written.
    return item.type.__name__ if type(item.type) is type else str(item.type)


@functools.cache
def free_keys() -> frozenset[str]:
    """Return the config keys whose value is a mapping with keys of the user's choice, such as rollout.sglang."""
    return frozenset(name for name, item in known_keys().items() if type_of(item).startswith("dict["))


def free_root(key: str) -> str | None:
    """Return the key among ``free_keys`` that ``key`` equals or lies below; None if there is none."""
    return next((root for root in free_keys() if key == root or key.startswith(f"{root}.")), None)


def is_text(key: str) -> bool:
    """Return whether ``key`` takes only strings (or null). A value such as ``data.jsonl@[0:100]`` then needs no quotes."""
    root = free_root(key)
    if root is not None:
        return key != root and type_of(known_keys()[root]) == "dict[str, str]"
    item = known_keys().get(key)
    return item is not None and type_of(item) in ("str", "str | None")


def describe(key: str) -> str:
    """Return the type, default and help of a known key, for error messages."""
    item = known_keys()[key]
    name = type_of(item)
    optional = " or null" if name.endswith(" | None") else ""
    word = TYPE_WORDS.get(name.removesuffix(" | None"), name)
    default = default_of(item)
    default_text = "" if default == MISSING else f", default {format_value(default)}"
    return f"{word}{optional}{default_text} ({item.metadata.get('help', '').rstrip('.')})"


def format_value(value: Any) -> str:
    """Format a value as on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(format_value(item) for item in cast('list[Any]', value))}]"
        case _:
            return str(value)


def unknown_key_problem(key: str, algo: str | None, our_key: str | None = None, *, in_recipe: bool = False) -> str:
    """Return the end of an error message that begins with the unknown ``key``. It suggests other keys or algorithms.

    ``algo`` is the run's algorithm, None if it is unknown. ``our_key`` is this project's key for what another project calls
    ``key``. With ``in_recipe``, a recipe sets the key.
    """
    if algo in ALGORITHMS and key.startswith("algo."):
        algo_keys = known_keys(algo)
        if key not in algo_keys and (algorithms := _algorithms_with(key)):
            fix = f"ignore the recipe's setting with '~{key}'" if in_recipe else f"remove {key}"
            choices = "one of these algorithms" if len(algorithms) > 1 else f"algo={algorithms[0]}"
            return f"exists only under algo={' or '.join(algorithms)}, and this run has algo={algo}: {fix}, or choose {choices}"
        return f"is unknown under algo={algo}: {_nearest(key, algo_keys, our_key, algo)}"
    all_keys = known_keys()
    group_keys = [k for k in all_keys if k.startswith(f"{key}.")]
    if group_keys:
        return f"is a group, not a key: set one of {', '.join(group_keys)}"
    return f"is unknown: {_nearest(key, all_keys, our_key, algo)}"


def _algorithms_with(key: str) -> list[str]:
    """Return the algorithms that have ``key``."""
    name = key.removeprefix("algo.")
    return [algorithm for algorithm, schema in ALGORITHMS.items() if name in {item.name for item in fields(schema)}]


def _nearest(key: str, candidates: Iterable[str], our_key: str | None, algo: str | None) -> str:
    """Return a hint: a key that ``key`` may stand for, else the keys of its group, else all groups.

    ``key`` may stand for a key with a similar name or the same last word, and for ``our_key`` (see ``unknown_key_problem``).
    """
    group, _, last = key.rpartition(".")
    options = list(candidates)
    in_group = [k for k in options if group and k.startswith(f"{group}.")]
    in_group.sort(key=lambda k: -k.count("."))  # among equal last words, the key outside subgroups comes last and wins
    last_words = {k.rpartition(".")[2]: k for k in in_group}
    if close := closest(last, last_words):
        return f"did you mean {last_words[close]!r}?"
    if our_key == "algo.name":
        return "the algorithm is chosen with algo=NAME, such as algo=grpo"
    if our_key is not None:
        return _suggested(our_key, algo)
    keys_of_others = [k.removeprefix("algo.") for k in known_keys() if k.startswith("algo.")] if group == "algo" else []
    if close := closest(last, keys_of_others):
        return _suggested(f"algo.{close}", algo)
    same_word = [k for k in options if k.rpartition(".")[2] == last]
    if 0 < len(same_word) <= MAX_SUGGESTIONS:
        return f"did you mean {' or '.join(repr(k) for k in same_word)}?"
    if in_group:
        return _keys_of(group, options) + _group_of(last)
    if close := closest(key, options):
        return f"did you mean {close!r}?"
    return f"the groups are {', '.join(_groups())}; python train.py --help GROUP lists the keys of one"


def _suggested(key: str, algo: str | None) -> str:
    """Return a hint that suggests the known ``key``, with the algorithms that have it if ``algo`` lacks it."""
    if algo is None or key in known_keys(algo):
        return f"did you mean {key!r}?"
    return f"did you mean {key!r}, which exists only under algo={' or '.join(_algorithms_with(key))}?"


def _keys_of(group: str, options: Iterable[str]) -> str:
    """Return a hint that lists the keys and subgroups of ``group`` and the command that describes them."""
    names_in_group = [k.removeprefix(f"{group}.").partition(".") for k in options if k.startswith(f"{group}.")]
    children = dict.fromkeys(f"{name}.*" if subkey else name for name, _, subkey in names_in_group)
    return f"{group} has {', '.join(children)} (python train.py --help {group.partition('.')[0]} describes them)"


def _group_of(word: str) -> str:
    """Return a hint that names the first config group whose name begins with ``word``: evaluation for ``eval``.

    The hint is empty if there is no such group, or if ``word`` has fewer than three letters.
    """
    name = next((name for name in _groups() if len(word) > 2 and name.startswith(word)), None)
    return f"; there is also a group {name}" if name else ""


def _groups() -> list[str]:
    return [item.name for item in fields(TrainConfig)]
