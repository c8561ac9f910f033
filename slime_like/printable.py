"""Make untrusted text (from models, datasets, file names, other users) safe to write to a terminal or a page.

``hide_in_logs`` masks secrets in logs.
"""

from __future__ import annotations

import logging
import os
import sys
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ALLOWED = "\n\t"
SECRET = "***"
HIDDEN = ("Cc", "Cf", "Cs", "Co")  # control, format (such as text direction), lone surrogates, private use


def visible(text: str) -> str:
    """Return ``text`` with control, format, surrogate and private-use characters escaped, except newlines and tabs."""
    if text.isprintable():
        return text
    return "".join(
        char if char in ALLOWED or unicodedata.category(char) not in HIDDEN else f"\\u{ord(char):04x}" for char in text
    )


def print_output(text: str) -> int:
    """Write the output of a command to standard output, escaped by ``visible``, and flush it. Return the exit code.

    The code is 1, with a message on stderr, if the output cannot be written, and 0 otherwise. A reader that has closed its
    pipe (``| head``) is not an error.
    """
    stream = sys.stdout
    if stream is None:  # pyright: ignore[reportUnnecessaryComparison]  closed by the caller of the program
        return _cannot_print("it is closed")
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(visible(text).encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)  # receives the remaining output, which Python flushes at exit
        os.dup2(null, stream.fileno())
        os.close(null)
        return 0 if isinstance(error, BrokenPipeError) else _cannot_print(str(error.strerror))
    return 0


def _cannot_print(reason: str) -> int:
    if sys.stderr is not None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr.write(visible(f"standard output cannot be written: {reason}\n"))
    return 1


def complaint(error: BaseException) -> str:
    """Return the line that reports ``error`` to a user."""
    return visible(f"{type(error).__name__}: {error}\n")


def hide_in_logs(secret: str) -> None:
    """Mask ``secret`` in every record that this process logs from now on, for current and future handlers.

    The message, its arguments and the traceback are masked. An argument that is neither a string nor a number is replaced by
    its masked ``str`` or ``repr`` if that contains the secret, and is otherwise unchanged; numbers are always unchanged.
    """
    base_factory = logging.getLogRecordFactory()

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        log_record = base_factory(*arguments, **options)
        log_record.msg = _mask(log_record.msg, secret)
        if isinstance(log_record.args, Mapping):  # logging.info("%(key)s", {"key": ...})
            log_record.args = {name: _mask(value, secret) for name, value in log_record.args.items()}
        elif log_record.args:
            log_record.args = tuple(_mask(value, secret) for value in log_record.args)
        if log_record.exc_info:
            traceback = logging.Formatter().formatException(log_record.exc_info)
            if secret in traceback:
                log_record.exc_text = traceback.replace(secret, SECRET)  # formatters print it unchanged
        return log_record

    logging.setLogRecordFactory(record)


def _mask(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return value.replace(secret, SECRET)
    if value is None or isinstance(value, int | float):
        return value
    with suppress(Exception):  # the log handler reports an object that cannot be converted to text
        for text in (str(value), repr(value)):
            if secret in text:
                return text.replace(secret, SECRET)
    return value
