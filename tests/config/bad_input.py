"""Assertions and parameters for tests of refused input."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError, SlimeLikeError


def message(argv: list[str], extra: str, *, files: bool, error: type[SlimeLikeError] = ConfigError) -> str:
    """Return the message of the error that a command line raises."""
    with pytest.raises(error) as error_info:
        load_config([*argv, *extra.split()], files=files)
    return str(error_info.value)


@contextmanager
def refusal(words: Iterable[str], error: type[SlimeLikeError] = ConfigError) -> Generator[None]:
    """Assert that the block raises ``error`` with a message that holds ``words``."""
    with pytest.raises(error) as error_info:
        yield
    assert all(word in str(error_info.value) for word in words), error_info.value


def each_rule(rules: Mapping[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test with ``case``, one of ``rules``: extra arguments, then words of the message."""
    return pytest.mark.parametrize("case", list(rules.values()), ids=list(rules))


def one_message(case: tuple[str, ...], argv: list[str]) -> None:
    """Assert that the extra arguments ``case[0]`` raise a one-line message with the other words of ``case``."""
    extra, *words = case
    text = message(argv, extra, files=False)
    assert all(word in text for word in words), text
    assert "\n" not in text
