"""All ranks of one role: called concurrently and waited for together, each with a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from slime_like.cluster.workers.wait import wait_all
from slime_like.config.schema.resolved import ActorSpec
from slime_like.util.deadline import Deadline

REST_DEADLINES = (
    2  # collective deadlines allowed for releasing communicators, which is one collective without computation
)
Refs = dict[str, "ray.ObjectRef[Any]"]  # rank name -> pending result


class RankGroup:
    """The workers of one role. ``start`` calls them; ``wait_all`` collects the results, also of several roles together."""

    def __init__(self, role: str, workers: Sequence[Any], local_ranks: Sequence[int], rank: ActorSpec) -> None:
        self.role = role
        self._workers = {f"{role} rank {rank}": worker for rank, worker in enumerate(workers)}
        self._local_ranks = local_ranks
        self._deadline_s = rank.deadline_s
        self._releases = rank.guard.release
        # Only the driver notices a rank that stops outside a collective; inside one, its peers should report first.
        self._rest_s = min(rank.deadline_s, REST_DEADLINES * rank.guard.deadline_s)
        self._dp_ranks: dict[str, int] = {}

    def rendezvous(self) -> Refs:
        """Request the rendezvous address from the first rank."""
        name, first = next(iter(self._workers.items()))
        return {name: first.rendezvous.remote()}

    def start_connect(self, spec: object, master: tuple[str, int]) -> Refs:
        """Join the ranks and build the model on each; pass the results to ``connected``."""
        return {
            name: worker.connect.remote(spec, master, local_rank)
            for (name, worker), local_rank in zip(self._workers.items(), self._local_ranks, strict=True)
        }

    def connected(self, answers: Mapping[str, Any]) -> None:
        """Store the data-parallel rank of each worker."""
        self._dp_ranks = {name: int(answers[name]) for name in self._workers}

    def start(self, verb: str, *args: Any) -> Refs:
        """Start the same call on every rank."""
        return {name: getattr(worker, verb).remote(*args) for name, worker in self._workers.items()}

    def start_sharded(self, verb: str, shards: Sequence[Any], *args: Any) -> Refs:
        """Start a call on every rank with the shard of its data-parallel rank."""
        return {
            name: getattr(worker, verb).remote(shards[self._dp_ranks[name]], *args)
            for name, worker in self._workers.items()
        }

    def on_all(self, verb: str, *args: Any, seconds: float | None = None) -> dict[str, Any]:
        """Make the same call on every rank and wait for the results."""
        return wait_all(self.start(verb, *args), self.deadline(verb, seconds))

    def rest(self) -> None:
        """Release communicators until the next call, under ``guard.release``. Idempotent."""
        if self._releases:
            self.on_all("rest", seconds=self._rest_s)

    def by_shard(self, answers: Mapping[str, Any]) -> list[Any]:
        """Return one result per data-parallel shard, from the rank that reports it; other ranks return None."""
        results = {self._dp_ranks[name]: answers[name] for name in self._workers if answers[name] is not None}
        assert len(results) == len(set(self._dp_ranks.values())), f"{self.role}: shards {sorted(results)} answered"
        return [results[rank] for rank in sorted(results)]

    def deadline(self, phase: str, seconds: float | None = None) -> Deadline:
        """Return the deadline of the driver for this role."""
        return Deadline("driver", phase, seconds or self._deadline_s)


def connect(
    groups: Sequence[tuple[RankGroup, object]], deadline: Deadline, waiting: Callable[[str], None] | None = None
) -> None:
    """Join the ranks of every (group, spec) concurrently, one world per group; ``waiting`` as in ``wait_all``."""
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
