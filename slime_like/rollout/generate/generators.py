"""What ``rollout.generate`` names, made ready: a function as it is, a class made once with its settings."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.config.schema import names
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.interfaces import Engine, GenerateContext, GenerateFn, Generator
from slime_like.metrics.types import Metric
from slime_like.registry import resolve
from slime_like.types import Prompt, Sample


def open_generator(config: RolloutConfig) -> Generator:
    """The generate function of a run. A class is called with ``config``; what it makes may hold servers and connections."""
    found = resolve("rollout.generate", config.generate, names.GENERATE)
    made = found(config) if isinstance(found, type) else found
    return made if isinstance(made, Generator) else _Stateless(made)


class _Stateless:
    """A plain function, with nothing to report and nothing to close."""

    def __init__(self, function: GenerateFn) -> None:
        self._function = function

    async def __call__(
        self, prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
    ) -> Sequence[Sample]:
        return await self._function(prompt, engine, seeds, context)

    def metrics(self) -> tuple[Metric, ...]:
        return ()

    def warnings(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None: ...
