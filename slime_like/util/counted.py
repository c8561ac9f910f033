"""Counts with a noun in printed lines, such as "1 engine" and "2 engines"."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``number`` followed by ``noun`` if it is 1, otherwise by ``plural``, by default ``noun`` with an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
