"""All ranks of one role: called at once, waited for together, each under its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from slime_like.cluster.workers.wait import wait_all
from slime_like.config.schema.resolved import ActorSpec
from slime_like.util.deadline import Deadline

REST_DEADLINES = 2  # of a collective: what letting communicators go may take, which is one and no computation
Refs = dict[str, "ray.ObjectRef[Any]"]  # name of a rank -> its answer to come


class RankGroup:
    """The workers of one role. ``start`` calls them, ``wait_all`` brings the answers: of several roles at once, if need be."""

    def __init__(self, role: str, workers: Sequence[Any], local_ranks: Sequence[int], rank: ActorSpec) -> None:
        self.role = role
        self._workers = {f"{role} rank {rank}": worker for rank, worker in enumerate(workers)}
        self._local_ranks = local_ranks
        self._deadline_s = rank.deadline_s
        self._releases = rank.guard.release
        # A rank that stops outside of a collective is missed by the driver alone; in one its peers are to tell first.
        self._rest_s = min(rank.deadline_s, REST_DEADLINES * rank.guard.deadline_s)
        self._dp_ranks: dict[str, int] = {}

    def rendezvous(self) -> Refs:
        """Where the ranks are to meet, from the first."""
        name, first = next(iter(self._workers.items()))
        return {name: first.rendezvous.remote()}

    def start_connect(self, spec: object, master: tuple[str, int]) -> Refs:
        """Join the ranks and build the model on each; the answers are for ``connected``."""
        return {
            name: worker.connect.remote(spec, master, local_rank)
            for (name, worker), local_rank in zip(self._workers.items(), self._local_ranks, strict=True)
        }

    def connected(self, answers: Mapping[str, Any]) -> None:
        """Learn each rank's place among the data-parallel ones."""
        self._dp_ranks = {name: int(answers[name]) for name in self._workers}

    def start(self, verb: str, *args: Any) -> Refs:
        """The same call on every rank."""
        return {name: getattr(worker, verb).remote(*args) for name, worker in self._workers.items()}

    def start_sharded(self, verb: str, shards: Sequence[Any], *args: Any) -> Refs:
        """A call on every rank with its data-parallel rank's part of ``shards``."""
        return {
            name: getattr(worker, verb).remote(shards[self._dp_ranks[name]], *args)
            for name, worker in self._workers.items()
        }

    def on_all(self, verb: str, *args: Any, seconds: float | None = None) -> dict[str, Any]:
        """The same call on every rank, waited for."""
        return wait_all(self.start(verb, *args), self.deadline(verb, seconds))

    def rest(self) -> None:
        """No rank communicates until the next call: under ``guard.release`` communicators go. Again and again is once."""
        if self._releases:
            self.on_all("rest", seconds=self._rest_s)

    def by_shard(self, answers: Mapping[str, Any]) -> list[Any]:
        """What the one rank that speaks for each data-parallel shard answered; the others answered None."""
        found = {self._dp_ranks[name]: answers[name] for name in self._workers if answers[name] is not None}
        assert len(found) == len(set(self._dp_ranks.values())), f"{self.role}: shards {sorted(found)} answered"
        return [found[rank] for rank in sorted(found)]

    def deadline(self, phase: str, seconds: float | None = None) -> Deadline:
        """How long the driver waits for this role."""
        return Deadline("driver", phase, seconds or self._deadline_s)


def connect(
    groups: Sequence[tuple[RankGroup, object]], deadline: Deadline, waiting: Callable[[str], None] | None = None
) -> None:
    """Join the ranks of every (group, spec) at once, each group in a world of its own; ``waiting`` as in ``wait_all``."""
    meeting: Refs = {}
    for group, _ in groups:
        meeting |= group.rendezvous()
    masters = list(wait_all(meeting, deadline, waiting).values())
    refs: Refs = {}
    for (group, spec), master in zip(groups, masters, strict=True):
        refs |= group.start_connect(spec, master)
    answers = wait_all(refs, deadline, waiting)
    for group, _ in groups:
        group.connected(answers)
