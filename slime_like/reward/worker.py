"""Worker process that runs reward functions, one call at a time: ``python -m slime_like.reward.worker <fd> <seconds> <bytes>``.

``fd`` is the worker's end of a pipe to the parent, ``seconds`` the time limit of a reward call. The kernel limits the memory of
this process and of each process it starts to ``bytes``, and the CPU time of each call. Imports are minimal: a reward imports its
own dependencies.
"""

from __future__ import annotations

import faulthandler
import math
import numbers
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, cast

from slime_like.config.schema.reward_names import split_prefix
from slime_like.reward.check import load_reward
from slime_like.reward.kinds import takes_groups
from slime_like.reward.latex import only_boxed
from slime_like.types import Prompt, Reward, Sample
from slime_like.util.deadline import scale
from slime_like.util.printed import record_output, record_streams
from slime_like.util.user_code import describe

MAX_SCORE = 1e9


def validated_reward(score: object, accuracy: object = None) -> Reward:
    """Return the values as a reward.

    Raises ``ValueError`` if the score is not a number from -``MAX_SCORE`` to ``MAX_SCORE``, or the accuracy is neither None
    nor a number from 0 to 1.
    """
    checked_accuracy = None if accuracy is None else _number(accuracy)
    if checked_accuracy is not None and not 0.0 <= checked_accuracy <= 1.0:
        raise ValueError(f"accuracy {checked_accuracy:g}, not a number from 0 to 1")
    number = _number(score)
    if abs(number) > MAX_SCORE:
        raise ValueError(f"{number:g}, not a number from -{MAX_SCORE:g} to {MAX_SCORE:g}")
    return Reward(number, checked_accuracy)


def _number(value: object) -> float:
    if not isinstance(value, numbers.Real):  # numpy's scalars count, its arrays and torch's tensors do not
        raise ValueError(f"{value!r:.80} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer or fraction beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number


LOAD_S = 120.0  # limit of a reward's imports, once per process
OUT_OF_MEMORY = 86  # exit code of a process that exceeded ``reward.memory_gb``
GRACE_S = 5.0  # seconds from the deadline until the process ends itself, in case the parent has ended

_load = lru_cache(load_reward)


@dataclass(frozen=True, slots=True)
class Load:
    """Request to import a reward."""

    name: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request to score one sample or, if the reward takes groups, all samples of a prompt."""

    name: str
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """Reply to a ``ScoreRequest`` (``rewards``, one per sample) or to a ``Load`` (``groups``: the reward takes groups).

    ``fault`` describes an error instead.
    """

    rewards: tuple[Reward, ...] = ()
    groups: bool = False
    fault: str = ""


def to_reward(value: object) -> Reward:
    """Convert the return value of a reward function. Raises ``ValueError`` unless ``validated_reward`` accepts it."""
    try:
        return validated_reward(value.score, value.accuracy) if isinstance(value, Reward) else validated_reward(value)
    except ValueError as error:
        raise ValueError(f"returned {error}") from error


def to_rewards(value: object, num_samples: int) -> tuple[Reward, ...]:
    """Convert the return value of a group reward.

    Raises ``ValueError`` unless it is a sequence (not a string) with one element per sample, and ``to_reward`` accepts each.
    """
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"returned {value!r:.80} ({type(value).__name__}), not a list of {num_samples} rewards")
    values = cast("Sequence[object]", value)
    if len(values) != num_samples:
        raise ValueError(f"returned {len(values)} rewards for {num_samples} samples")
    return tuple(map(to_reward, values))


def answer(request: Load | ScoreRequest) -> ScoreReply:
    """Load or call the reward; return an error as a fault, with the end of the reward's output.

    The fault includes the source line if the reward raised the error.

    If the process runs out of memory, it exits with code ``OUT_OF_MEMORY``: memory held by the reward cannot be reclaimed.
    """
    with record_output() as output:
        reply = _answer(request)
    return replace(reply, fault=reply.fault + output.clause()) if reply.fault else reply


def _answer(request: Load | ScoreRequest) -> ScoreReply:
    # Fault boundary around user code: its error ends the run. While sys.exit ended this process, the parent would see the
    # closed pipe, kill the process, and count the call as killed.
    try:
        function: Any = _load("reward", request.name)
        groups = takes_groups(function)
        if isinstance(request, Load):
            return ScoreReply(groups=groups)
        samples = tuple(map(only_boxed, request.samples)) if split_prefix(request.name)[0] else request.samples
        value = function(request.prompt, samples if groups else samples[0])
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return ScoreReply(fault=f"raised {describe(error)}")
    try:
        return ScoreReply(rewards=to_rewards(value, len(samples)) if groups else (to_reward(value),))
    except ValueError as error:
        return ScoreReply(fault=str(error))


def limit_memory(num_bytes: int) -> None:
    """Disable core files, and limit the private memory of this process and of each process it starts; 0 means no limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if num_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def limit_cpu(seconds: float) -> None:
    """Let this process use further CPU time of ``seconds`` times the number of cores; SIGXCPU then ends it.

    Child processes inherit the limit.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds * (os.cpu_count() or 1)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def serve(pipe: Connection, seconds: float) -> None:
    """Answer requests until the parent closes the pipe. A request that exceeds its limit by ``GRACE_S`` ends the process.

    The limit is ``seconds`` for a ``ScoreRequest`` and ``LOAD_S`` for a ``Load``, multiplied by ``scale()``.
    """
    record_streams()
    while True:
        try:
            request: Load | ScoreRequest = pipe.recv()
        except EOFError:
            return
        # The watchdog is a C thread: it also works while a call holds the interpreter's lock.
        limit = scale() * (LOAD_S if isinstance(request, Load) else seconds)
        limit_cpu(limit + GRACE_S)
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

    worker.limit_memory(int(sys.argv[3]))
    worker.serve(Connection(int(sys.argv[1])), float(sys.argv[2]))
