"""Start, watch and stop the parts of an engine on nodes other than its first."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from slime_like.cluster.supervise.crash import one_line
from slime_like.cluster.workers.calls import call, start_actor, wait_all
from slime_like.cluster.workers.engine_part import EnginePart
from slime_like.cluster.workers.engine_process import VISIBLE_DEVICES
from slime_like.cluster.workers.node_affinity import on_node
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError, EngineNodeLost, WorkerError
from slime_like.rollout.engine.node import EngineNode
from slime_like.util.deadline import Deadline, scale

PART_CALLS = 4  # concurrent calls of one part: one of them waits for its server to end
POLL_S = 0.5
STOP_S = 10.0  # for the actors of other nodes to stop their servers
ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """Node and GPUs of a part of an engine."""

    node_id: str  # assigned by Ray
    address: str
    gpus: str = ""  # comma-separated ids of the part's GPUs on the node; empty on CPUs


@dataclass(frozen=True, slots=True)
class PartSettings:
    """Settings of an engine, from which ``_start`` derives the arguments of each ``EnginePart``."""

    name: str  # of the engine
    spec: EngineSpec
    admin_key: str
    stacks_dir: str
    env: Mapping[str, str]


class EngineParts:
    """Owner of an engine's actors on other nodes, from one start of the engine to its stop.

    If one of these actors ends, or the server that the actor started, the first node's server is ended too. The remaining
    parts end with ``stop`` at the latest.
    """

    def __init__(
        self, settings: PartSettings, slots: Sequence[NodeSlot], node: EngineNode, end_engine: Callable[[], None]
    ) -> None:
        """Start an actor per slot, and a thread that calls ``end_engine`` after a loss, to stop the first node's server."""
        self.cause_of_loss = ""  # names the node and the cause
        self._node_lost = False  # the actor has ended, not only the server
        self._end_engine = end_engine
        self._closing = threading.Event()
        self._actors = {slot: _start(settings, rank, slot, node) for rank, slot in enumerate(slots, 1)}
        self._ends = {call(actor, EnginePart.wait_for_end): slot for slot, actor in self._actors.items()}
        threading.Thread(target=self._watch, name="engine parts", daemon=True).start()

    def wait_ready(self, deadline: Deadline) -> None:
        """Wait until the servers of all parts respond.

        Raises ``EngineNodeLost`` if the actor of a part died, for example because its node was lost, ``EngineError`` if a part
        failed or ``stop`` was called, or ``DeadlineExceeded``. The error names the part.
        """
        refs = {
            f"its part on node {slot.address}": call(actor, EnginePart.ready) for slot, actor in self._actors.items()
        }
        try:
            wait_all(refs, deadline)
        except WorkerError as error:
            is_lost = error.died and not self._closing.is_set()  # ``stop`` kills the actors
            raise (EngineNodeLost if is_lost else EngineError)(str(error)) from error

    def raise_loss(self, error: EngineError) -> None:
        """Raise ``EngineNodeLost`` if the actor of a part has ended, or ``EngineError`` if only its server has.

        Do nothing if no part is lost. The message includes ``error``, the error of the first node: the loss may have caused
        it, or the reverse.
        """
        if self.cause_of_loss:
            text = f"{self.cause_of_loss}\nfirst node: {error}"
            raise (EngineNodeLost if self._node_lost else EngineError)(text) from error

    def stopped_pids(self) -> tuple[int, ...]:
        """Return the pids of suspended (SIGSTOP) processes on all parts that answer in time.

        The time limit is ``ANSWER_S`` times the deadline factor.
        """
        refs = [call(actor, EnginePart.stopped_pids) for actor in self._actors.values()]
        ready_refs, _ = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S * scale()) if refs else ([], [])
        pids: list[int] = []
        for ref in ready_refs:
            with contextlib.suppress(RayError):  # lost: the watching thread ends the engine
                pids += ray.get(ref)
        return tuple(pids)

    def stop(self, stop_first: Callable[[], None]) -> None:
        """Stop the servers of all parts and, at the same time, the first node's server with ``stop_first``.

        Then kill the actors, including those that did not answer, for example on a lost node.
        """
        self._closing.set()  # from here, the end of a part is not a loss
        refs: list[ObjectRef[None]] = [call(actor, EnginePart.stop) for actor in self._actors.values()]
        stop_first()
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=STOP_S * scale())
        for actor in self._actors.values():
            ray.kill(actor)

    def _watch(self) -> None:
        """Call ``end_engine`` once a part has ended, because the other ranks would wait in a collective for the missing ones.

        Return once ``stop`` is called.
        """
        while self._ends and not self._closing.is_set():
            ended_refs, _ = ray.wait(list(self._ends), num_returns=1, timeout=POLL_S)
            if ended_refs and not self._closing.is_set():
                self._record_loss(ended_refs[0])
                self._end_engine()
                return

    def _record_loss(self, ended_ref: ObjectRef[str]) -> None:
        slot = self._ends[ended_ref]
        try:
            cause = ray.get(ended_ref)
        except (RayActorError, ActorUnschedulableError) as error:
            self._node_lost, cause = True, one_line(error)
        except RayError as error:
            cause = one_line(error)
        self.cause_of_loss = f"its part on node {slot.address} was lost: {cause}"


def _start(settings: PartSettings, rank: int, slot: NodeSlot, node: EngineNode) -> ActorHandle[EnginePart]:
    log = Path(settings.spec.log_path)
    spec = replace(settings.spec, log_path=str(log.with_name(f"{log.stem}_node{rank}{log.suffix}")))
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": PART_CALLS,
        "scheduling_strategy": on_node(slot.node_id),
    }
    env = {**settings.env, **({VISIBLE_DEVICES: slot.gpus} if slot.gpus else {})}
    name = f"{settings.name} node {rank}"
    return start_actor(EnginePart, **options)(
        name, spec, settings.admin_key, settings.stacks_dir, env, replace(node, rank=rank)
    )
