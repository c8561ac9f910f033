"""Assertions about values on a GPU. A phantom GPU runs every call of a test, but its kernels and products compute nothing."""

from __future__ import annotations

from slime_like.phantom.counters import is_phantom


def has_values() -> bool:
    """Return whether the device of this process computes values and takes time: False on a phantom GPU."""
    return not is_phantom()
