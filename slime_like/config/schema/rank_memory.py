"""Memory of an engine's rank on a CPU, by which SGLang sizes its caches as on a GPU of that memory."""

from __future__ import annotations

import os

from slime_like.errors import ConfigError

VARIABLE = "SLIME_LIKE_ENGINE_RANK_MEMORY"
"""Environment variable with a number of bytes. Unset: SGLang reads the free memory of the machine."""

MAX_DIGITS = 18


def rank_memory() -> int | None:
    """Return the bytes for weights and caches of each rank, or None. Raises ``ConfigError`` if the variable has no such number."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and int(text)):
        raise ConfigError(
            f"{VARIABLE}={text!r} is not a number of bytes above 0: set it to a number such as {1 << 30}, or unset it"
        )
    return int(text)
