"""Functions that tests name by path, as a user does: generate functions, filters, rewards."""

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

NUM_INTACT_GROUPS = 16  # first groups, which ``shift_logprobs`` does not change
HOLD_FOLDER = "SLIME_LIKE_TEST_HOLD"  # variable with the folder through which a test controls ``wait_at_step``
POLL_S = 0.2


async def generate(prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext) -> Sequence[Sample]:
    """Generate samples for the first two seeds only."""
    print("a generate function's own line")  # noqa: T201
    return await single_turn(prompt, engine, seeds[:2], context)


async def shift_logprobs(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Fault: after ``NUM_INTACT_GROUPS`` groups, each token has the log-probability of the token before it."""
    samples = await single_turn(prompt, engine, seeds, context)
    if context.group_id < NUM_INTACT_GROUPS:
        return samples
    return [
        replace(s, logprobs=np.concatenate([s.logprobs[: n + 1], s.logprobs[n:-1]]))
        for s in samples
        for n in [s.num_prompt_tokens]
    ]


_seed_counter = itertools.count()


async def draw_process_seeds(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Fault: seeds count the samples of this process, so a resumed run has other seeds."""
    return await single_turn(prompt, engine, [next(_seed_counter) for _ in seeds], context)


async def wait_at_step(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Wait once the step in the file ``after`` is logged, until the file changes; an evaluation (one seed) never waits.

    The empty files ``waits<step>`` and ``goes<step>`` tell the test that samples wait at the step, or have continued after it.
    """
    folder, last_wait = Path(os.environ[HOLD_FOLDER]), 0
    while (
        len(seeds) > 1 and (step := _step_to_wait_at(folder)) is not None and last_step(folder.parent / "run") >= step
    ):
        (folder / f"waits{step}").touch()
        last_wait = step
        await asyncio.sleep(POLL_S)
    (folder / f"goes{last_wait}").touch()
    return await single_turn(prompt, engine, seeds, context)


def _step_to_wait_at(folder: Path) -> int | None:
    try:
        return int((folder / "after").read_text())
    except FileNotFoundError:
        return None


def even_prompts(group: SampleGroup) -> str | None:
    """Drop every group of an odd prompt."""
    return None if group.prompt.prompt_id % 2 == 0 else "odd prompt"


def length(prompt: Prompt, sample: Sample) -> float:
    """Return the number of characters."""
    del prompt
    print("a reward's own line", file=sys.stderr)  # noqa: T201
    return float(len(sample.text))


@scores_groups
def shortest(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    """Return 1 for the shortest answers to a prompt, else 0."""
    del prompt
    min_length = min(len(sample.text) for sample in samples)
    return [float(len(sample.text) == min_length) for sample in samples]


def digits(prompt: Prompt, sample: Sample) -> float:
    """Return a score that differs between the answers of a random model and that the model can learn."""
    del prompt
    return float(sum(int(c) for c in sample.text if c.isdigit()) % 5)


def num_digits(prompt: Prompt, sample: Sample) -> float:
    """Return the number of digits, which a random model learns to increase within a few rollouts."""
    del prompt
    return float(sum(c.isdigit() for c in sample.text))


def not_every_fourth(group: SampleGroup) -> str | None:
    """Drop the groups of every fourth prompt, so that other groups are carried over."""
    return None if group.prompt.prompt_id % 4 else "fourth prompt"
