"""Checks of user code that a config key names, and errors that name the key, the line of the code and the input."""

from __future__ import annotations

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError, SlimeLikeError, UserCodeError
from slime_like.util.printed import record_output

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = {"site-packages", "dist-packages"}  # folders of libraries
MAX_TEXT = 500  # characters of an error's own text in a message


def check_signature(key: str, name: str, function: Callable[..., Any], form: str, num_args: int) -> None:
    """Raise ``ConfigError`` if ``function`` has a signature that does not accept ``num_args`` positional arguments.

    ``form`` is the expected call as the error message shows it, such as ``filter(group)``.
    """
    try:
        inspect.signature(function).bind(*[None] * num_args)
    except TypeError as error:
        raise ConfigError(
            f"{key}={name!r} cannot be called as {form}: {error}{location(function)}; docs/extending.md describes the call"
        ) from error
    except ValueError:  # a builtin without a signature
        pass


@contextmanager
def name_user_errors(key: str, name: str, subject: str) -> Generator[None]:
    """Raise an exception of user code as a ``UserCodeError`` with ``key``, ``name``, the line, ``subject`` and recorded output.

    ``subject`` is the input or the purpose of the call, such as ``step 3``. Errors of this project are raised unchanged: a lost
    engine is not the fault of the code that waited for it. ``SystemExit`` is raised unchanged too.
    """
    with record_output() as output:
        try:
            yield
        except SlimeLikeError:
            raise
        except Exception as error:
            raise UserCodeError(f"{key}={name} raised {describe(error)}, for {subject}{output.clause()}") from error


def describe(error: BaseException) -> str:
    """Return an error's type, text and origin on one line, such as ``ValueError: no digits (my_reward.py:12)``.

    The text is truncated to ``MAX_TEXT`` characters.
    """
    text = " ".join(str(error).split())[:MAX_TEXT]
    return f"{type(error).__name__}: {text} ({origin(error)})"


def origin(error: BaseException) -> str:
    """Return ``file:line`` of a syntax error, or of the innermost frame of user code (``is_user_file``).

    If there is no such frame, return ``file:line`` of the innermost frame; without a traceback, return "line unknown".
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    if not frames:
        return "line unknown"
    user_frames = [frame for frame in frames if is_user_file(frame.filename)]
    frame = (user_frames or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def is_user_file(file: str) -> bool:
    """Return False for a file of slime_like, of the standard library or of an installed package."""
    path = Path(file)
    return INSTALLED.isdisjoint(path.parts) and {PACKAGE_ROOT, STDLIB}.isdisjoint(path.resolve().parents)


def location(function: object) -> str:
    """Return ``source_place`` after a space and in parentheses; empty if there is no place."""
    place = source_place(function)
    return f" ({place})" if place else ""


def source_place(function: object) -> str:
    """Return ``file:line`` of the definition of a function or class, or of an object's class; empty if it is not in Python.

    The place of a function that a decorator wraps (``functools.wraps``) is that of the function itself.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = function if inspect.isclass(function) or inspect.isroutine(function) else type(function)
    try:
        code = inspect.unwrap(code)
        file, (_, line) = inspect.getsourcefile(code), inspect.getsourcelines(code)
    except (OSError, TypeError, AttributeError, ValueError):  # ValueError: functions that wrap each other
        return ""
    return f"{file}:{line}" if file else ""
