"""User functions that drop every group, return a wrong type or wrong fields, or raise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.interfaces import Engine, GenerateContext
from slime_like.rollout.generate.single_turn import single_turn
from slime_like.types import Prompt, Sample, SampleGroup


def drop_all(group: SampleGroup) -> str:
    """Drop every group."""
    del group
    return "never good"


def keep_by_true(group: SampleGroup) -> bool:
    """Return True for a group to keep, as filters of other frameworks do."""
    del group
    return True


async def return_nothing(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> None:
    """Forget to return the samples."""
    await single_turn(prompt, engine, seeds, context)


async def raise_error(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> None:
    """Fail after the engine has answered."""
    await single_turn(prompt, engine, seeds, context)
    raise ValueError("no tool")


async def number_groups(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Give the samples another group id than the context's."""
    samples = await single_turn(prompt, engine, seeds, context)
    return [replace(sample, group_id=context.group_id + 100) for sample in samples]


async def forget_versions(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Remove the weight versions of sampled tokens."""
    samples = await single_turn(prompt, engine, seeds, context)
    return [replace(sample, spans=tuple(replace(span, version=-1) for span in sample.spans)) for sample in samples]
