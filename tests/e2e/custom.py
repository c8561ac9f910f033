"""What a user brings by dotted path: a generate function, a filter, rewards."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from slime_like.interfaces import Engine, GenerateContext
from slime_like.reward.kinds import scores_groups
from slime_like.rollout.generate.single_turn import single_turn
from slime_like.types import Prompt, Sample, SampleGroup
from tests.e2e.runs import last_step

WHOLE_GROUPS = 16  # that ``shifted`` leaves as they are
HOLD = "SLIME_LIKE_TEST_HOLD"  # the folder beside a run's where ``held`` reads and says how far it is
POLL_S = 0.05


async def generate(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Two of the seeds only."""
    print("a generate function's own line")  # noqa: T201
    return await single_turn(prompt, engine, seeds[:2], context)


async def shifted(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """A fault: after some groups, each token has the log-probability of the token before it."""
    samples = await single_turn(prompt, engine, seeds, context)
    if context.group_id < WHOLE_GROUPS:
        return samples
    return [
        replace(s, logprobs=np.concatenate([s.logprobs[: n + 1], s.logprobs[n:-1]]))
        for s in samples
        for n in [s.num_prompt_tokens]
    ]


_drawn = itertools.count()


async def counted_seeds(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """A fault: seeds by how many were drawn in this process, which a resumed run cannot know."""
    return await single_turn(prompt, engine, [next(_drawn) for _ in seeds], context)


async def held(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Waits once the step in the file ``after`` is logged, for as long as that says so; an evaluation, of one seed, never does."""
    folder, waited = Path(os.environ[HOLD]), 0
    while len(seeds) > 1 and (after := _step(folder)) is not None and last_step(folder.parent / "run") >= after:
        (folder / f"waits{after}").touch()
        waited = after
        await asyncio.sleep(POLL_S)
    (folder / f"goes{waited}").touch()
    return await single_turn(prompt, engine, seeds, context)


def _step(folder: Path) -> int | None:
    try:
        return int((folder / "after").read_text())
    except FileNotFoundError:
        return None


def even_prompts(group: SampleGroup) -> str | None:
    """Drops every group of an odd prompt."""
    return None if group.prompt.prompt_id % 2 == 0 else "odd prompt"


def length(prompt: Prompt, sample: Sample) -> float:
    """Number of characters."""
    del prompt
    print("a reward's own line", file=sys.stderr)  # noqa: T201
    return float(len(sample.text))


@scores_groups
def shortest(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    """1 for the shortest of a prompt's answers."""
    del prompt
    least = min(len(sample.text) for sample in samples)
    return [float(len(sample.text) == least) for sample in samples]


def digits(prompt: Prompt, sample: Sample) -> float:
    """A score that the answers of a random model differ in, and that it can learn."""
    del prompt
    return float(sum(int(c) for c in sample.text if c.isdigit()) % 5)


def not_every_fourth(group: SampleGroup) -> str | None:
    """Drops groups now and then, so that some are carried on."""
    return None if group.prompt.prompt_id % 4 else "fourth prompt"
