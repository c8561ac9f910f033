"""Before an op: whether to ask for free memory, and what follows when there is too little."""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.config.guard_policy import ACTIONS, Policy
from slime_like.distributed.counters import Counter
from slime_like.distributed.memory import MemorySource
from slime_like.distributed.pace import Pace
from slime_like.errors import MemoryShortage

NEVER = (1 << 63) - 1
REQUEST_BITS = 3  # of the word that ranks share, for the action; the rest counts requests


@dataclass(slots=True)
class Guard:
    """The guard of one rank. ``check`` is called before an op whose counter is due, and sets when it is due next."""

    source: MemorySource
    requests: Requests | None = None  # shared by the ranks of a node, for group decisions
    lowest: int | None = None  # free memory, since the last drain
    last: int | None = None  # free memory, as found last
    _counters: list[Counter] = field(default_factory=list[Counter])
    _paces: dict[Policy, Pace] = field(default_factory=dict[Policy, Pace])
    _resting: set[Policy] = field(default_factory=set[Policy])  # acted, and memory has not recovered since

    def adopt(self, counter: Counter) -> None:
        """Look after a new counter."""
        self._counters.append(counter)
        counter.due = NEVER if counter.policy.checks == "never" and self.requests is None else 0

    def forget(self, counter: Counter) -> None:
        """A counter whose group is gone."""
        self._counters.remove(counter)

    def check(self, counter: Counter, now: int) -> None:
        """Ask if it is time to, and act as the op's policy says. Raises ``MemoryShortage`` under ``action=raise``."""
        if self.requests is not None and (asked := self.requests.news()):
            self._act(counter, asked, f"another rank of this node asked for it ({self.source.name} memory)")
        policy = counter.policy
        match policy.checks:
            case "never":
                return
            case "every_n" if (counter.calls - 1) % policy.every:
                return
            case "auto" if now < (due := self._pace(policy).due):
                counter.due = 0 if self.requests is not None else due
                return
            case _:
                self._ask(counter, policy)

    def _pace(self, policy: Policy) -> Pace:
        pace = self._paces.get(policy)
        if pace is None:
            pace = self._paces[policy] = Pace(policy.budget)
        return pace

    def _ask(self, counter: Counter, policy: Policy) -> None:
        started = time.perf_counter_ns()
        free, threshold = self.source.free(), policy.threshold.of(self.source.total)
        short = free < threshold
        if policy.checks == "auto":
            pace = self._pace(policy)
            held = self.source.held()
            pace.learn(started, time.perf_counter_ns() - started, free, held, threshold)
            short = short or pace.too_late
            for other in self._counters if self.requests is None else ():
                if other.policy is policy or other.policy == policy:
                    other.due = pace.due
        self.last = free
        self.lowest = free if self.lowest is None else min(self.lowest, free)
        counter.checks += 1
        counter.check_ns += time.perf_counter_ns() - started
        if free >= threshold * (1 + policy.hysteresis):
            self._resting.discard(policy)
        if short and not (policy.checks in ("below", "auto") and policy in self._resting):
            self._resting.add(policy)
            if self.requests is not None and policy.action != "none":
                self.requests.ask(policy.action)
            self._act(counter, policy.action, f"threshold {policy.threshold}")

    def _act(self, counter: Counter, action: str, why: str) -> None:
        """Do ``action`` on this rank alone."""
        started, before = time.perf_counter_ns(), self.source.free()
        counter.shortages += 1
        match action:
            case "trim":
                self.source.trim()
            case "clear":
                self.source.clear()
            case "raise":
                raise MemoryShortage(
                    f"{before / 2**30:.2f} GiB of {self.source.name} memory are free before {counter.op.name} in group "
                    f"{counter.group.info.label}: {why}, guard.action=raise; lower parallel.max_tokens_per_rank or the "
                    "engines' share, or set guard.action=clear"
                )
            case _:
                return
        counter.clears += 1
        counter.freed += max(0, self.source.free() - before)
        counter.clear_ns += time.perf_counter_ns() - started


class Requests:
    """One word of memory that the ranks of a node share: a rank that acts says so, the others do likewise.

    Nobody waits for anybody, so that it cannot deadlock: a rank sees the word before its next op, and since ranks meet in
    their ops all act within one. Two ranks that ask at once write the same word, which is one request.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.truncate(8)
            self._memory = mmap.mmap(file.fileno(), 8)
        self._word = memoryview(self._memory).cast("q")
        self._path = path
        self._seen = self._word[0]

    def ask(self, action: str) -> None:
        """Everybody else is to do ``action``."""
        self._seen = (((self._seen >> REQUEST_BITS) + 1) << REQUEST_BITS) | ACTIONS.index(action)
        self._word[0] = self._seen

    def news(self) -> str:
        """The action that somebody asked for since the last call, or nothing."""
        word = self._word[0]
        if word == self._seen:
            return ""
        self._seen = word
        return ACTIONS[word & ((1 << REQUEST_BITS) - 1)]

    def close(self) -> None:
        """Remove it."""
        self._word.release()
        self._memory.close()
        self._path.unlink(missing_ok=True)
