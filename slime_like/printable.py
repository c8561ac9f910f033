"""Text of models, data sets, file names and other users, made safe to write to a terminal or a page."""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

KEPT = "\n\t"
SECRET = "***"
HIDDEN = ("Cc", "Cf", "Cs", "Co")  # control, format (direction of writing), lone surrogates, private use


def visible(text: str) -> str:
    """Return ``text`` with control, format and lone surrogate characters spelled out, so that none acts on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char in KEPT or unicodedata.category(char) not in HIDDEN else f"\\u{ord(char):04x}" for char in text
    )


def complaint(error: BaseException) -> str:
    """Return the line that tells a user of ``error``."""
    return visible(f"{type(error).__name__}: {error}\n")


def hide_in_logs(secret: str) -> None:
    """Replace ``secret`` in every record that this process logs from now on, whatever handlers there will be."""
    make = logging.getLogRecordFactory()

    def without(value: Any) -> Any:
        return value.replace(secret, SECRET) if isinstance(value, str) else value

    def record(*arguments: Any, **options: Any) -> logging.LogRecord:
        made = make(*arguments, **options)
        made.msg = without(made.msg)
        if isinstance(made.args, tuple):
            made.args = tuple(map(without, made.args))
        return made

    logging.setLogRecordFactory(record)
