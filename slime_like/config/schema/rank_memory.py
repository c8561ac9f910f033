"""Memory budget of a rank of a CPU engine. SGLang sizes its caches as on a GPU with that much memory."""

from __future__ import annotations

import os

from slime_like.errors import ConfigError

VARIABLE = "SLIME_LIKE_ENGINE_RANK_MEMORY"
"""Environment variable with a number of bytes. Unset: SGLang reads the free memory of the machine."""

MAX_DIGITS = 18


def rank_memory() -> int | None:
    """Return the bytes for each rank's weights and caches, or None if ``VARIABLE`` is unset.

    Raises ``ConfigError`` if the variable is not a number of bytes above 0.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS and int(text)):
        raise ConfigError(
            f"{VARIABLE}={text!r} is not a number of bytes above 0: set it to a number such as {1 << 30}, or unset {VARIABLE}"
        )
    return int(text)
