"""Import of the modules that the config names, by module name or as a Python file."""

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
    """Import ``module``, a module name or a file that ends in ``.py``; the current directory is appended to ``sys.path``.

    Raises ``ConfigError`` naming ``key`` and ``value`` if the module is missing or its code raises; in the second case,
    the message names the line. A ``ConfigError`` of the code is raised unchanged.
    """
    _append(Path.cwd())
    try:
        return _of_file(key, value, module) if module.endswith(".py") else importlib.import_module(module)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        missing_module = error.name or ""
        if f"{module}.".startswith(f"{missing_module}."):
            raise ConfigError(_missing_module(key, value, module, str(error))) from error
        raise ConfigError(
            f"{key}={value!r}: importing {module!r} raised {describe(error)}: install {missing_module or 'it'}, put it in "
            f"{Path.cwd()} or on PYTHONPATH, or correct that line"
        ) from error
    except (Exception, SystemExit) as error:  # user code may raise anything, and parse_args() raises SystemExit
        raise ConfigError(
            f"{key}={value!r}: importing {module!r} raised {describe(error)}: correct that line"
        ) from error


def check_exists(key: str, value: str) -> None:
    """Raise ``ConfigError`` if the file or the top-level package that ``value`` names is missing. Nothing is imported.

    ``value`` is ``file.py:attribute`` or ``package.module:attribute``. A module name that begins with a dot is refused too.
    """
    module = value.rpartition(":")[0]
    if module.endswith(".py"):
        _existing_file(key, value, module)
        return
    _append(Path.cwd())
    package = module.partition(".")[0]
    if not package:
        raise ConfigError(f"{key}={value!r}: the module begins with a dot: give its name from the top-level package on")
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise ConfigError(_missing_module(key, value, module, f"No module named {package!r}"))


def absolute(name: str) -> str:
    """Return ``file.py:attribute`` with an absolute path; return other names, and names of missing files, unchanged."""
    file, colon, attribute = name.rpartition(":")
    if not file.endswith(".py") or (path := _file(file)) is None:
        return name
    return f"{path}{colon}{attribute}"


def _file(name: str) -> Path | None:
    """Search the current directory, then ``sys.path``, for the file ``name``; return its absolute path, or None."""
    path = os.path.expanduser(name)
    files = (os.path.join(folder, path) for folder in (".", *sys.path))
    return next((Path(file).resolve() for file in files if os.path.isfile(file)), None)


def _existing_file(key: str, value: str, name: str) -> Path:
    """Return the absolute path that ``_file`` finds for ``name``. Raises ``ConfigError`` if it finds none."""
    if (file := _file(name)) is None:
        path = Path(os.path.expanduser(name))
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"{key}={value!r}: there is no file {path}{place}: correct the path")
    return file


def _missing_module(key: str, value: str, module: str, reason: str) -> str:
    return (
        f"{key}={value!r}: cannot import {module!r} ({reason}); is it installed, in the current directory {Path.cwd()} or "
        "on PYTHONPATH?"
    )


def _of_file(key: str, value: str, name: str) -> ModuleType:
    """Import a file once per process. The file can import modules of its own folder.

    Raises ``ConfigError`` if there is no such file. An error of the import itself is raised unchanged.
    """
    file = _existing_file(key, value, name)
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
