"""A process that runs reward functions, one call at a time: ``python -m slime_like.reward.worker <fd> <seconds> <bytes>``.

Its parent holds the other end of the pipe. Imports stay light: whatever a reward needs it brings itself. The kernel limits
its memory, and that of each process it starts, to ``bytes``, and the CPU time of each call.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, cast

from slime_like.config.schema.reward_names import split_prefix
from slime_like.reward.boxed import only_boxed
from slime_like.reward.check import load_reward
from slime_like.reward.kinds import takes_groups
from slime_like.reward.number import checked
from slime_like.types import Prompt, Reward, Sample
from slime_like.util.deadline import scale
from slime_like.util.printed import record_streams, recorded
from slime_like.util.user_code import describe

LOAD_S = 120.0  # longest time the imports of a reward may take, once per process
OUT_OF_MEMORY = 86  # exit code of a process that ``reward.memory_gb`` refused memory
GRACE_S = 5.0  # after its deadline a call ends its own process, in case the parent is gone

_load = lru_cache(load_reward)


@dataclass(frozen=True, slots=True)
class Load:
    """Import a reward."""

    name: str


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score one sample or, where the reward takes groups, all samples of a prompt."""

    name: str
    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """``rewards`` of a ``ScoreRequest``, one per sample; of a ``Load``, whether it takes groups. ``fault``: what went wrong instead."""

    rewards: tuple[Reward, ...] = ()
    groups: bool = False
    fault: str = ""


def to_reward(value: object) -> Reward:
    """Return what a reward function returned as a ``Reward``. Raises ``ValueError`` unless ``checked`` takes it."""
    try:
        return checked(value.score, value.accuracy) if isinstance(value, Reward) else checked(value)
    except ValueError as error:
        raise ValueError(f"returned {error}") from error


def to_rewards(value: object, wanted: int) -> tuple[Reward, ...]:
    """What a reward of groups returned. Raises ``ValueError`` unless it is one finite number per sample."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"returned {value!r:.80} ({type(value).__name__}), not a list of {wanted} rewards")
    found = cast("Sequence[object]", value)
    if len(found) != wanted:
        raise ValueError(f"returned {len(found)} rewards for {wanted} samples")
    return tuple(map(to_reward, found))


def answer(request: Load | ScoreRequest) -> ScoreReply:
    """Load or call the reward; an error of its own becomes a fault with its line and the end of its output.

    A process that got no more memory ends: what the reward holds cannot be taken back.
    """
    with recorded() as output:
        found = _answer(request)
    return replace(found, fault=found.fault + output.clause()) if found.fault else found


def _answer(request: Load | ScoreRequest) -> ScoreReply:
    # A fault boundary: code of the user runs inside, and the run ends with what it raised.
    try:
        function: Any = _load("reward", request.name)
        groups = takes_groups(function)
        if isinstance(request, Load):
            return ScoreReply(groups=groups)
        samples = tuple(map(only_boxed, request.samples)) if split_prefix(request.name)[0] else request.samples
        value = function(request.prompt, samples if groups else samples[0])
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:  # noqa: BLE001
        return ScoreReply(fault=f"raised {describe(error)}")
    try:
        return ScoreReply(rewards=to_rewards(value, len(samples)) if groups else (to_reward(value),))
    except ValueError as error:
        return ScoreReply(fault=str(error))


def limit_memory(num_bytes: int) -> None:
    """Limit the private memory of this process and of each that it starts; 0: no limit. It writes no core file either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if num_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def limit_cpu(seconds: float) -> None:
    """Let this process, and each that it starts from now on, compute for ``seconds`` on every core; then SIGXCPU ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def serve(pipe: Connection, seconds: float) -> None:
    """Answer requests until the parent closes the pipe."""
    record_streams()
    while True:
        try:
            request: Load | ScoreRequest = pipe.recv()
        except EOFError:
            return
        # The watchdog is a C thread: it works even while a call holds the interpreter's lock.
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
