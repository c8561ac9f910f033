"""Reward functions as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_like.reward.kinds import scores_groups
from slime_like.types import Prompt, Reward, Sample

NOT_A_FUNCTION = 3


@scores_groups
def ranks(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    """The longer among its group the better, 0 to 1."""
    order = sorted(samples, key=lambda sample: len(sample.text))
    return [order.index(sample) / max(len(samples) - 1, 1) for sample in samples]


@scores_groups
def too_few(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    return [1.0]


@scores_groups
def hangs_for_all(prompt: Prompt, samples: Sequence[Sample]) -> list[float]:
    while True:
        pass


def length(prompt: Prompt, sample: Sample) -> float:
    return float(len(sample.text))


def shaped(prompt: Prompt, sample: Sample) -> Reward:
    return Reward(score=np.float32(0.5), accuracy=1)  # pyright: ignore[reportArgumentType]


def imported_torch(prompt: Prompt, sample: Sample) -> float:
    return float("torch" in sys.modules or "ray" in sys.modules)


def nan(prompt: Prompt, sample: Sample) -> float:
    return float("nan")


def infinite(prompt: Prompt, sample: Sample) -> Reward:
    return Reward(score=1.0, accuracy=float("inf"))


def text(prompt: Prompt, sample: Sample):
    return "0.5"


def nothing(prompt: Prompt, sample: Sample):
    return None


def raises(prompt: Prompt, sample: Sample) -> float:
    return 1 / len(sample.extras)


def exits(prompt: Prompt, sample: Sample) -> float:
    os._exit(3)


def hangs_on_x(prompt: Prompt, sample: Sample) -> float:
    """Never returns for the text ``x``, with a child that does not end either; writes both pids first."""
    if sample.text != "x":
        return 1.0
    child = subprocess.Popen(["sleep", "600"])
    Path(prompt.metadata["pids"]).write_text(f"{os.getpid()} {child.pid}")
    while True:
        pass


async def coroutine(prompt: Prompt, sample: Sample) -> float:
    await asyncio.sleep(0)
    return 1.0


def three_arguments(prompt: Prompt, sample: Sample, tokenizer: object) -> float:
    return 1.0
