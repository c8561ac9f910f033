"""A process that runs reward functions, one call at a time: ``python -m slime_like.reward.worker <fd> <seconds>``.

Its parent holds the other end of the pipe. Imports stay light: whatever a reward needs it brings itself.
"""

from __future__ import annotations

import faulthandler
import math
import numbers
import sys
import traceback
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection

from slime_like.deadline import scale
from slime_like.reward.check import load_reward
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
    """Score one sample."""

    name: str
    prompt: Prompt
    sample: Sample


@dataclass(frozen=True, slots=True)
class Answer:
    """``reward`` of a ``Call``, None for a ``Load``; ``fault`` says what went wrong instead."""

    reward: Reward | None = None
    fault: str = ""


def to_reward(value: object) -> Reward:
    """What a reward function returned, as a ``Reward``. Raises ``ValueError`` unless it is a finite number."""
    reward = value if isinstance(value, Reward) else Reward(_number(value))
    score = _number(reward.score)
    accuracy = None if reward.accuracy is None else _number(reward.accuracy)
    return Reward(score, accuracy)


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
        function = _load("reward.name", request.name)
        if isinstance(request, Load):
            return Answer()
        value = function(request.prompt, request.sample)
    except Exception as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(fault=f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
    try:
        return Answer(reward=to_reward(value))
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
