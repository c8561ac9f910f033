"""A process that runs reward functions, one call at a time: ``python -m slime_like.reward.worker <fd> <seconds>``.

Its parent holds the other end of the pipe. Imports stay light: whatever a reward needs it brings itself.
"""

from __future__ import annotations

import faulthandler
import math
import numbers
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, cast

from slime_like.config.reward_names import split_prefix
from slime_like.deadline import scale
from slime_like.reward.boxed import only_boxed
from slime_like.reward.check import load_reward
from slime_like.reward.kinds import takes_groups
from slime_like.types import Prompt, Reward, Sample

LOAD_S = 120.0  # longest time the imports of a reward may take, once per process
GRACE_S = 5.0  # after its deadline a call ends its own process, in case the parent is gone

_load = lru_cache(load_reward)


@dataclass(frozen=True, slots=True)
class Load:
    """Import a reward."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """Score one sample or, where the reward takes groups, all samples of a prompt."""

    name: str
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """``rewards`` of a ``Call``, one per sample; of a ``Load``, whether it takes groups. ``fault``: what went wrong instead."""

    rewards: tuple[Reward, ...] = ()
    groups: bool = False
    fault: str = ""


def to_reward(value: object) -> Reward:
    """What a reward function returned, as a ``Reward``. Raises ``ValueError`` unless it is a finite number."""
    reward = value if isinstance(value, Reward) else Reward(_number(value))
    score = _number(reward.score)
    accuracy = None if reward.accuracy is None else _number(reward.accuracy)
    return Reward(score, accuracy)


def to_rewards(value: object, wanted: int) -> tuple[Reward, ...]:
    """What a reward of groups returned. Raises ``ValueError`` unless it is one finite number per sample."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"returned {value!r:.80} ({type(value).__name__}), not a list of {wanted} rewards")
    found = cast("Sequence[object]", value)
    if len(found) != wanted:
        raise ValueError(f"returned {len(found)} rewards for {wanted} samples")
    return tuple(map(to_reward, found))


def _number(value: object) -> float:
    if not isinstance(value, numbers.Real):  # numpy's scalars count, its arrays and torch's tensors do not
        raise ValueError(f"returned {value!r:.80} ({type(value).__name__}), not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, not a finite number")
    return number


def answer(request: Load | Call) -> Answer:
    """Do what is asked; whatever the reward raises becomes a fault with the line that raised it."""
    # A fault boundary: code of the user runs inside, and the run ends with what it raised.
    try:
        function: Any = _load("reward", request.name)
        groups = takes_groups(function)
        if isinstance(request, Load):
            return Answer(groups=groups)
        samples = tuple(map(only_boxed, request.samples)) if split_prefix(request.name)[0] else request.samples
        value = function(request.prompt, samples if groups else samples[0])
    except Exception as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(fault=f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    try:
        return Answer(rewards=to_rewards(value, len(samples)) if groups else (to_reward(value),))
    except ValueError as error:
        return Answer(fault=str(error))


def serve(pipe: Connection, seconds: float) -> None:
    """Answer requests until the parent closes the pipe."""
    while True:
        try:
            request: Load | Call = pipe.recv()
        except EOFError:
            return
        # The watchdog is a C thread: it works even while a call holds the interpreter's lock.
        limit = scale() * (LOAD_S if isinstance(request, Load) else seconds)
        faulthandler.dump_traceback_later(limit + GRACE_S, exit=True)
        try:
            result = answer(request)
        finally:
            faulthandler.cancel_dump_traceback_later()
        try:
            pipe.send(result)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    # Requests are pickled under the package's name of this module, not under __main__.
    from slime_like.reward import worker

    worker.serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
