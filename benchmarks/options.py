"""Types of the benchmarks' options, which reject a bad value before anything is measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container


def at_least(minimum: int, *, multiple: int = 1) -> Callable[[str], int]:
    """Return a function that parses a whole number of at least ``minimum`` that is a multiple of ``multiple``.

    It raises ``ArgumentTypeError`` on other text, as argparse expects of the type of an option.
    """
    kind = f"a number of at least {minimum}" + (f" that is a multiple of {multiple}" if multiple > 1 else "")

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < minimum or int(text) % multiple:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
        return int(text)

    return parse


def comma_separated[T](parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return a function that splits text at commas and parses each part with ``parse``; for argparse's ``type``."""
    return lambda text: [parse(value) for value in text.split(",")]


def name_of(names: Container[str], description: str) -> Callable[[str], str]:
    """Return a function that accepts text if it is one of ``names``; for argparse's ``type``.

    On other text it raises ``ArgumentTypeError``, whose message names the choices by ``description``.
    """

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {description}")
        return text

    return parse
