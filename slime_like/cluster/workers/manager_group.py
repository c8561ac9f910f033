"""The driver's handle of the ``rollout.num_managers`` rollout managers of a run, each with a share of prompts and engines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate

from ray import ObjectRef
from ray.actor import ActorHandle

from slime_like.cluster.workers.calls import call, wait_settled
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.data.share import ManagerShare
from slime_like.util.deadline import Deadline


@dataclass(frozen=True, slots=True)
class ManagerGroup:
    """Actors of all rollout managers, in the order of their shares."""

    actors: tuple[ActorHandle[RolloutActor], ...]

    @property
    def shares(self) -> tuple[ManagerShare, ...]:
        """Share of each manager."""
        return tuple(ManagerShare(index, len(self.actors)) for index in range(len(self.actors)))

    def start[**P, R](
        self, method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> dict[str, ObjectRef[R]]:
        """Start a method on every manager; return the pending results by the managers' names."""
        return self.start_each(lambda actor, _: call(actor, method, *args, **kwargs))

    def start_each[R](
        self, start: Callable[[ActorHandle[RolloutActor], ManagerShare], ObjectRef[R]]
    ) -> dict[str, ObjectRef[R]]:
        """Call ``start`` with every manager and its share; return the pending results by the managers' names."""
        return {share.name: start(actor, share) for actor, share in zip(self.actors, self.shares, strict=True)}

    def call[**P, R](
        self,
        deadline: Deadline,
        method: Callable[Concatenate[RolloutActor, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call a method of every manager and return the results. Errors as in ``wait_settled``."""
        return list(wait_settled(self.start(method, *args, **kwargs), deadline).values())
