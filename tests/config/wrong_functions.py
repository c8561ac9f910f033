"""Functions that do not have the signature of the key they are named for."""

from __future__ import annotations


def no_filter(group: object, second: object) -> None:
    """A filter with an argument too many."""


def one_argument(config: object) -> None:
    """A data source without its context."""


async def generate_of_two(prompt: object, engine: object = None) -> None:
    """A generate function without seeds and context."""


def blocking(prompt: object, engine: object, seeds: object, context: object) -> None:
    """A generate function that is not a coroutine function."""


class Blocking:
    """A generate class whose instances are not called as coroutines."""

    def __init__(self, config: object) -> None: ...

    def __call__(self, prompt: object, engine: object, seeds: object, context: object) -> None: ...


class WithoutConfig:
    """A generate class that does not take its settings."""

    async def __call__(self, prompt: object, engine: object, seeds: object, context: object) -> None: ...
