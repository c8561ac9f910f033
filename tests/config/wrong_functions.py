"""User functions with wrong signatures."""

from __future__ import annotations


def no_filter(group: object, second: object) -> None:
    """Filter with an extra argument."""


def one_argument(config: object) -> None:
    """Data source without a context argument."""


async def generate_of_two(prompt: object, engine: object = None) -> None:
    """Generate function without seeds and context."""


def blocking(prompt: object, engine: object, seeds: object, context: object) -> None:
    """Generate function that is not a coroutine function."""


class Blocking:
    """Generate class whose ``__call__`` is not a coroutine function."""

    def __init__(self, config: object) -> None: ...

    def __call__(self, prompt: object, engine: object, seeds: object, context: object) -> None: ...


class WithoutCall:
    """Generate class without a method ``__call__``."""

    def __init__(self, config: object) -> None: ...


class WithoutConfig:
    """Generate class whose constructor takes no config."""

    async def __call__(self, prompt: object, engine: object, seeds: object, context: object) -> None: ...
