"""Resolve names in the configuration to objects. The tables of names are in ``slime_like.config.schema.names``."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from slime_like.errors import ConfigError
from slime_like.util.user_module import user_module

OWN_PACKAGES = ("slime_like.", "slime_like_plugins.")  # prefixes of the modules of this project
_WORDS = re.compile("[-_.:/ ]")
SIMILAR = 0.8  # minimum ratio of matching characters for a name to count as a misspelling
SIMILAR_WORD = 0.7  # the same for a single word of more than three letters
SHORT_WORD = 3  # letters; in words up to this length, one letter makes a different word: gpu is not a misspelled cpu


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant by ``name``, or None if none is similar.

    A known name is similar if nearly all its characters match, or if it contains each word of ``name`` (allowing for
    typing errors) and at most twice as many words: ``n_samples_per_prompt`` is similar to ``n_samples``, but
    ``transport`` is not similar to ``port``. Of equally similar names, the last in alphabetical order is returned: for
    ``qwen4``, this is ``qwen3``, not ``qwen2``.
    """
    scores = {option: _similarity(name.lstrip("-"), option.lstrip("-")) for option in sorted(names, reverse=True)}
    best = max(scores, key=lambda option: scores[option], default=None)
    return best if best is not None and scores[best] > 0 else None


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or all known names if none is close."""
    options = sorted(names)
    close = closest(name, options)
    return f"did you mean {close!r}?" if close is not None else f"known: {', '.join(options)}"


def _similarity(name: str, option: str) -> float:
    """Return a score above 0 if ``option`` is similar to ``name``, else 0.

    A similar option that consists of the same characters in any order scores highest.
    """
    ratio = difflib.SequenceMatcher(None, option, name).ratio()
    words, option_words = _WORDS.split(name), _WORDS.split(option)
    same_words = 2 * len(words) >= len(option_words) and all(
        any(_is_similar_word(word, other) for other in option_words) for word in words
    )
    return ratio + (sorted(name) == sorted(option)) if ratio >= SIMILAR or same_words else 0.0


def _is_similar_word(word: str, other: str) -> bool:
    if word == other or len(word) <= SHORT_WORD:
        return word == other
    return difflib.SequenceMatcher(None, other, word).ratio() >= SIMILAR_WORD


def is_path(name: str | None) -> bool:
    """Return whether ``name`` is an import path, ``module:attribute`` or ``file.py:attribute``; either part may be missing."""
    return name is not None and ":" in name


def is_shipped(name: str, table: Mapping[str, str]) -> bool:
    """Return whether ``table`` maps ``name`` to an object of slime_like or slime_like_plugins.

    The tests check that these objects can be called, so that a run need not check them.
    """
    return table.get(name, "").startswith(OWN_PACKAGES)


def is_user_code(name: str | None, table: Mapping[str, str]) -> bool:
    """Return whether ``name`` is an import path, or a name that ``table`` maps to code outside this project."""
    return name is not None and is_path(table.get(name, name)) and not is_shipped(name, table)


def metric_part(name: str) -> str:
    """Return ``name`` as part of a metric's name: a file loses its folder, so that ``/a/b.py:f`` becomes ``b.py:f``."""
    return name.rpartition("/")[2] if is_path(name) else name


def check(key: str, name: str, table: Mapping[str, object], *, dotted: bool = False, table_name: str = "") -> None:
    """Raise ``ConfigError`` unless ``name`` is in ``table`` or, if ``dotted``, is a complete import path.

    The message says how to add a user's component: by its import path if ``dotted``, otherwise by an entry in the table
    ``table_name``, if that is given.
    """
    if name in table:
        return
    if dotted and is_path(name):
        check_path(key, name)
        return
    hint = _own_path(name) if dotted else own_entry(table_name)
    raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}{hint}")


def check_path(key: str, name: str) -> None:
    """Raise ``ConfigError`` unless ``name`` is an import path, with a module and a function."""
    if not is_path(name):
        raise ConfigError(f"{key}={name!r} is not a path such as my_file.py:function or my_package.my_module:function")
    module, _, function = name.rpartition(":")
    if not module:
        raise ConfigError(
            f"{key}={name!r} has no file or module before the colon: write my_file.py:FUNCTION or "
            "my_package.my_module:FUNCTION"
        )
    if not function:
        raise ConfigError(f"{key}={name!r} has no name of a function after the colon: write {module}:FUNCTION")


def not_one_of(value: str, choices: Iterable[str]) -> str:
    """Return the text after an invalid ``value`` in an error message: all ``choices``, and the closest one if it is similar."""
    options = list(choices)
    close = closest(value, options)
    return f"is not one of {', '.join(options)}: {f'did you mean {close!r}?' if close else 'choose one of these'}"


def own_entry(table_name: str) -> str:
    """Return a hint to add a user's component to the table ``table_name``; empty if ``table_name`` is empty."""
    if not table_name:
        return ""
    return f" (your own: add it to {table_name} in slime_like/config/schema/names.py, see docs/extending.md)"


def _own_path(name: str) -> str:
    """Return a hint for a user's own function: an import path guessed from ``name`` or, if none can be guessed, two examples."""
    module, _, function = name.rpartition(".")
    likely = f"{name}:FUNCTION" if function == "py" else f"{module}:{function}" if module else ""
    example = likely or "my_package.my_module:my_function or my_file.py:my_function"
    return f" (your own code: {example}, see docs/extending.md)"


def resolve(key: str, name: str, table: dict[str, str]) -> Any:
    """Import and return the object that ``table`` maps ``name`` to or, if ``name`` is an import path, the object at that path.

    Raises ``ConfigError`` naming ``key`` if ``name`` is unknown or an incomplete path, if its module or one that it imports is
    missing, if the module lacks the attribute, or if the import of a user's module raises an error. Other errors in the import
    of a module of this project are raised unchanged.
    """
    target = table.get(name, name)
    if not is_path(target):
        raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}")
    check_path(key, target)
    module_name, _, attribute = target.rpartition(":")
    try:
        shipped = is_shipped(name, table)
        module = importlib.import_module(module_name) if shipped else user_module(key, name, module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}={name!r}: cannot import {module_name!r} ({error}): install the package") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        file = "" if module_name.endswith(".py") else f" ({getattr(module, '__file__', None) or 'a folder'})"
        raise ConfigError(
            f"{key}={name!r}: module {module_name!r}{file} has no {attribute!r}; {_nearest_function(attribute, module)}"
        ) from error


def _nearest_function(name: str, module: ModuleType) -> str:
    """Return a hint for an attribute that ``module`` lacks: a similar name, or all public functions and classes it defines."""
    public = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    if close := closest(name, public):
        return f"did you mean {close!r}?"
    home = module.__name__
    functions = sorted(
        key for key, value in public.items() if f"{getattr(value, '__module__', '')}.".startswith(f"{home}.")
    )
    return (
        f"known: {', '.join(functions)}"
        if functions
        else f"it defines no function or class: add {name}, or correct the path"
    )
