"""Resolution of ``rollout.generate``: a function is used as it is, a class is instantiated once with its settings."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.config.schema import names
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.interfaces import Engine, GenerateContext, GenerateFn, Generator
from slime_like.metrics.types import Metric
from slime_like.registry import resolve
from slime_like.types import Prompt, Sample


def open_generator(config: RolloutConfig) -> Generator:
    """Return the generate function of a run. A class is instantiated with ``config`` and may own servers and connections."""
    target = resolve("rollout.generate", config.generate, names.GENERATE)
    generator = target(config) if isinstance(target, type) else target
    return generator if isinstance(generator, Generator) else _Stateless(generator)


class _Stateless:
    """A plain function without metrics, warnings or resources."""

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
