"""Modules that the config names, by module name or as a Python file."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from slime_like.errors import ConfigError
from slime_like.util.user_code import describe


def user_module(key: str, value: str, module: str) -> ModuleType:
    """Import ``module``, a module name or a file that ends in ``.py``; the current directory is importable.

    Raises ``ConfigError`` with ``key``, ``value`` and the user's own line when the import fails.
    """
    _append(Path.cwd())
    try:
        return _of_file(key, value, module) if module.endswith(".py") else importlib.import_module(module)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={value!r}: cannot import {module!r} ({error}); is it installed, in the current directory {Path.cwd()} "
            "or on PYTHONPATH?"
        ) from error
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{key}={value!r}: importing {module!r} raised {describe(error)}: correct that line"
        ) from error


def absolute(name: str) -> str:
    """Return ``file.py:attribute`` with an absolute path; return other names, and names of missing files, unchanged."""
    file, colon, attribute = name.rpartition(":")
    if not file.endswith(".py") or (path := _file(file)) is None:
        return name
    return f"{path}{colon}{attribute}"


def _file(name: str) -> Path | None:
    """Return the file ``name`` of the current directory or, as for modules, of a folder of ``sys.path``."""
    path = os.path.expanduser(name)
    files = (os.path.join(folder, path) for folder in (".", *sys.path))
    return next((Path(file).resolve() for file in files if os.path.isfile(file)), None)


def _of_file(key: str, value: str, name: str) -> ModuleType:
    """Import a file once per process. It can import modules of its own folder.

    Raises ``ConfigError`` if there is no such file, or the error that the import raised.
    """
    file = _file(name)
    if file is None:
        raise ConfigError(f"{key}={value!r}: there is no file {name} in {Path.cwd()}: correct the path")
    # The hash distinguishes the name from those of installed modules.
    module_name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    _append(file.parent)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _append(folder: Path) -> None:
    """Make the modules of ``folder`` importable after all others, so that they shadow no other module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
