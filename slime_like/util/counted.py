"""Numbers of things in printed lines, such as "1 engine" and "2 engines"."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``number`` and ``noun``, or ``plural`` unless the number is 1. Default of ``plural``: ``noun`` with an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
