"""Numbers of examples of property tests."""

from __future__ import annotations

from hypothesis import settings


def num_examples(num: int) -> int:
    """Return ``num`` in the entire suite, a quarter of it in ``scripts/check.sh``, whose profile has a quarter of the examples."""
    return max(2, num * settings().max_examples // 100)
