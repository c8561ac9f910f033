"""What the tests of bad input share."""

from __future__ import annotations

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError, SlimeLikeError


def message(argv: list[str], extra: str, *, files: bool, error: type[SlimeLikeError] = ConfigError) -> str:
    """What a command line that cannot work is told."""
    with pytest.raises(error) as caught:
        load_config([*argv, *extra.split()], files=files)
    return str(caught.value)


def one_message(case: tuple[str, ...], argv: list[str]) -> None:
    """Assert that extra arguments, the first of ``case``, end in one line that holds the words after them."""
    extra, *words = case
    text = message(argv, extra, files=False)
    assert all(word in text for word in words), text
    assert "\n" not in text
