"""User-defined reward functions, valid and faulty."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
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
    """Score samples by their length rank in the group, 0 to 1."""
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
    print("about to divide")  # noqa: T201
    return 1 / len(sample.extras)


def exits(prompt: Prompt, sample: Sample) -> float:
    os._exit(3)


def calls_sys_exit(prompt: Prompt, sample: Sample) -> float:
    sys.exit(3)


def ends_on_x(prompt: Prompt, sample: Sample) -> float:
    """End the process for the text ``x``, by the metadata's signal or by running out of memory. Its child survives."""
    if sample.text != "x":
        return 1.0
    child = subprocess.Popen(["sleep", "600"])
    with Path(prompt.metadata["pids"]).open("a") as file:
        file.write(f"{child.pid} ")
    if prompt.metadata["by"] == "memory":
        return float(len(bytearray(2**40)))
    os.kill(os.getpid(), signal.Signals[prompt.metadata["by"]])
    return 0.0


def starts_child(prompt: Prompt, sample: Sample) -> float:
    """Append the pid of this process and of a child that does not end to the metadata's file."""
    child = subprocess.Popen(["sleep", "600"])
    with Path(prompt.metadata["pids"]).open("a") as file:
        file.write(f"{os.getpid()} {child.pid} ")
    return 1.0


def huge(prompt: Prompt, sample: Sample) -> int:
    return 10**400


def too_right(prompt: Prompt, sample: Sample) -> Reward:
    return Reward(score=1.0, accuracy=7.0)


def limits(prompt: Prompt, sample: Sample) -> float:
    """Return this process's memory limit in GiB; asserts that CPU time is limited too."""
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] > 0
    return resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30


def hangs_on_x(prompt: Prompt, sample: Sample) -> float:
    """Hang for the text ``x``, with a child that does not end either, after writing both pids."""
    if sample.text != "x":
        return 1.0
    child = subprocess.Popen(["sleep", "600"])
    Path(prompt.metadata["pids"]).write_text(f"{os.getpid()} {child.pid}")
    signal.pause()
    return 0.0


async def coroutine(prompt: Prompt, sample: Sample) -> float:
    await asyncio.sleep(0)
    return 1.0


def three_arguments(prompt: Prompt, sample: Sample, tokenizer: object) -> float:
    return 1.0
