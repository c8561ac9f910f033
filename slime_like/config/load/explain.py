"""Conversion of Hydra, OmegaConf and YAML errors to a ``ConfigError`` that names the key, the value and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from slime_like.config.load.other_names import our_key
from slime_like.config.load.paths import config_folder
from slime_like.config.schema.known import ALGORITHMS, describe, free_root, known_keys, unknown_key_problem
from slime_like.errors import ConfigError
from slime_like.registry import nearest


def explain(
    error: Exception,
    values: Mapping[str, str],
    algo: str | None,
    key: str = "",
    files: Mapping[str, Path | None] = MappingProxyType({}),
) -> ConfigError:
    """Return ``error`` as a ``ConfigError``.

    ``values`` maps each key on the command line to its text. ``algo`` is the chosen algorithm, and ``key`` is the key
    that was set, if it is known. ``files`` is a result of ``config_files``.
    """
    chain = list(_chain(error))
    text = "\n".join(str(e) for e in chain)
    if missing_file := re.search(r"Could not find '([\w-]+)/([^']+)'", text):
        return _unknown_option(missing_file[1], missing_file[2], text)
    source = _source(text)
    location = f" (in {_file_text(source, files.get(source))})" if source else ""
    if missing_file := re.search(r"Could not load '([\w-]+/[^']+)'", text):
        return ConfigError(
            f"{missing_file[1]}{location} is unknown: there is no {missing_file[1]}.yaml in configs or the folder of --config-dir"
        )
    if mark := next((m for e in chain if (m := getattr(e, "problem_mark", None)) is not None), None):
        problem = getattr(error, "problem", "")
        return ConfigError(f"{mark.name}:{mark.line + 1}: not valid YAML: {problem}; check indentation and brackets")
    cause = next((e for e in chain if getattr(e, "full_key", None)), None)
    at_fault = str(getattr(cause, "full_key", "") or "")
    key = at_fault if not key or at_fault.startswith(f"{key}.") else key
    if not key:
        return ConfigError(f"cannot read the configuration{location}: {str(error).splitlines()[0]}")
    override = f"{key}={values[key]}" if key in values and not location else key
    kind, message = type(cause).__name__, str(getattr(cause, "msg", "")).splitlines()[0:1]
    if kind in ("ConfigAttributeError", "ConfigKeyError"):
        algo = algo or _algorithm_of(cause)
        hint = unknown_key_problem(key, algo, our_key(key), in_recipe=source.startswith("recipe/"))
        return ConfigError(f"{override}{location} {hint}")
    root = key if key in known_keys() else free_root(key)
    if root is not None:
        reason = f": {message[0]}" if kind.startswith("Interpolation") and message else ""
        return ConfigError(f"{override}{location} is not a valid value for this key{reason}; expected {describe(root)}")
    return ConfigError(f"{override}{location} cannot be used: {unknown_key_problem(key, algo)}")


def _algorithm_of(error: object) -> str | None:
    """Return the algorithm whose schema an OmegaConf error names; None if the error names no algorithm's schema."""
    schema = getattr(error, "object_type", None)
    return next((name for name, candidate in ALGORITHMS.items() if candidate is schema), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _source(text: str) -> str:
    """Return the config, such as ``recipe/mine``, that an error's ``text`` names; empty if it names none or ``train``."""
    match = re.search(r"In '([^']+)':", text)
    return match[1] if match and match[1] != "train" else ""


def _file_text(name: str, path: Path | None) -> str:
    """Return ``path``, the file of config ``name``, for a message: relative to the repository if it is in ``configs``."""
    is_shipped = path is None or path.is_relative_to(config_folder())
    return f"configs/{name}.yaml" if is_shipped else str(path)


def _unknown_option(group: str, name: str, text: str) -> ConfigError:
    """Return the ``ConfigError`` for an unknown ``name`` of a config group; Hydra's error ``text`` lists the known names."""
    options = [line.strip() for line in re.findall(r"^\s+([\w-]+)$", text, re.MULTILINE)]
    flag = "+recipe" if group == "recipe" else group
    hint = nearest(name, options) if options else f"there is no file in configs/{group}"
    place = "table ALGORITHMS of slime_like/config/schema/names.py" if group == "algo" else f"files of configs/{group}"
    return ConfigError(f"{flag}={name} is unknown: {hint} ({place})")
