"""Refusal of sampling settings that leave no token to sample. SGLang itself refuses them only once an engine runs."""

from __future__ import annotations

from slime_like.errors import ConfigError

OFF = {"top_p": 1, "top_k": -1}
"""Sampling setting -> its value that allows all tokens."""


def refuse_no_token(key: str, name: str, value: float) -> None:
    """Raise ``ConfigError`` if the ``value`` of ``key`` is 0. ``name`` is the sampling setting: "top_p" or "top_k"."""
    if value == 0:
        raise ConfigError(f"{key}={value!r} leaves no token to sample: set {key}={OFF[name]}, which samples from all")
