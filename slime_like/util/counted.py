"""Counts with a noun in printed lines, such as "1 engine" and "2 engines"."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``number`` with ``noun`` if the number is 1, else with ``plural``, which defaults to ``noun`` plus "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
