"""Waits for calls of Ray actors: their number, and the error that is raised when several ranks fail."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayTaskError

from slime_like.cluster.supervise import driver_link
from slime_like.cluster.workers import calls, lost_node
from slime_like.errors import CheckpointError, CollectiveError, DeadlineExceeded, WorkerError
from slime_like.util.deadline import Deadline, scale

LIMIT_S = 1000.0
messages: Any = importlib.import_module("ray.core.generated.common_pb2")  # generated, without types


class SimulatedRay:
    """``ray.wait`` and ``ray.get`` of calls that end at given seconds, on a simulated clock."""

    def __init__(self, seconds: Mapping[str, float], errors: Mapping[str, Exception] | None = None) -> None:
        self._seconds, self._errors = seconds, errors or {}
        self.now, self.num_refs = 0.0, 0
        self.num_nodes = 1

    def wait(self, refs: Sequence[str], *, num_returns: int = 1, timeout: float) -> tuple[list[str], list[str]]:
        """Advance the clock until ``num_returns`` calls have ended, at most by ``timeout``; count the refs."""
        assert timeout >= 0
        self.num_refs += len(refs)
        enough = sorted(self._seconds[ref] for ref in refs)[num_returns - 1]
        self.now = max(self.now, min(self.now + timeout, enough))
        ready = [ref for ref in refs if self._seconds[ref] <= self.now][:num_returns]
        return ready, [ref for ref in refs if ref not in set(ready)]

    def nodes(self) -> list[str]:
        """Return the nodes of the cluster."""
        return ["node"] * self.num_nodes

    def get(self, ref: str, *, timeout: float) -> str:
        """Return or raise the result of a call that has ended."""
        assert self._seconds[ref] <= self.now and timeout > 0
        if ref in self._errors:
            raise self._errors[ref]
        return ref.upper()


def simulate(
    monkeypatch: pytest.MonkeyPatch, seconds: Mapping[str, float], errors: Mapping[str, Exception] | None = None
) -> SimulatedRay:
    simulated = SimulatedRay(seconds, errors)
    monkeypatch.setattr(calls, "ray", simulated)
    monkeypatch.setattr(Deadline, "elapsed", lambda deadline: simulated.now)
    return simulated


def wait(seconds: Mapping[str, float], limit: float = LIMIT_S, waiting: Any = None) -> dict[str, Any]:
    refs: Any = {f"rank {ref}": ref for ref in seconds}
    return calls.wait_all(refs, Deadline("driver", "step", limit), waiting)


def failed(cause: Exception) -> Exception:
    """Return the error that Ray raises for a call that raised ``cause``."""
    return RayTaskError("step", str(cause), cause)


@pytest.mark.parametrize("interval", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("num_ranks", [16, 256, 4096])
def test_the_number_of_refs_passed_to_ray_grows_linearly_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, interval: float
) -> None:
    seconds = {str(rank): interval * (num_ranks - rank) for rank in range(num_ranks)}
    simulated = simulate(monkeypatch, seconds)
    assert list(wait(seconds)) == [f"rank {rank}" for rank in range(num_ranks)]
    num_waits = 8 + interval * num_ranks / calls.POLL_S  # 8 while the waits become longer, then one per POLL_S
    assert simulated.num_refs <= num_ranks * num_waits
    assert simulated.now == interval * num_ranks, "it returns as soon as the last result is available"


def test_an_error_is_raised_while_other_calls_are_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"0": 900.0, "1": 900.0, "2": 30.0}
    simulated = simulate(monkeypatch, seconds, {"2": ActorDiedError()})
    with pytest.raises(WorkerError, match="rank 2 died in phase 'step'"):
        wait(seconds)
    assert simulated.now <= 30.0 + calls.POLL_S


@pytest.mark.parametrize("later", [0.0, 0.5, 1.5])
def test_a_death_is_the_cause_of_errors_of_its_peers(monkeypatch: pytest.MonkeyPatch, later: float) -> None:
    seconds = {"0": 5.0, "1": 5.0 + later, "2": 900.0}
    errors = {"0": failed(RuntimeError("connection closed by peer")), "1": ActorDiedError()}
    simulate(monkeypatch, seconds, errors)
    with pytest.raises(WorkerError, match="rank 1 died") as error_info:
        wait(seconds)
    assert error_info.value.died


@pytest.mark.parametrize(("num_nodes", "later"), [(1, 1.5), (2, 1.5), (2, 40.0)])
def test_a_lost_node_is_the_cause_of_a_failed_collective(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, later: float
) -> None:
    """The connections of a lost node break at once, but Ray declares the node dead later."""
    seconds = {"0": 5.0, "1": 5.0 + later, "2": 900.0}
    errors = {"0": failed(CollectiveError("all_gather #4 failed on rank 0")), "1": ActorDiedError()}
    simulated = simulate(monkeypatch, seconds, errors)
    simulated.num_nodes = num_nodes
    with pytest.raises(WorkerError, match="rank 1 died") as error_info:
        wait(seconds)
    assert error_info.value.died and simulated.now <= 5.0 + later + 2 * calls.POLL_S


def test_a_lost_node_is_the_cause_if_the_deadline_passes_before_ray_declares_it_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {"0": LIMIT_S - 10.0, "1": LIMIT_S + 30.0, "2": 2 * LIMIT_S}
    errors = {"0": failed(CollectiveError("all_gather #4 failed on rank 0")), "1": ActorDiedError()}
    simulate(monkeypatch, seconds, errors).num_nodes = 2
    with pytest.raises(WorkerError, match="rank 1 died"):
        wait(seconds)


@pytest.mark.parametrize(("num_nodes", "limit"), [(1, calls.GRACE_S), (2, calls.DECLARED_S)])
def test_a_failed_collective_is_the_cause_if_no_process_dies(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int, limit: float
) -> None:
    seconds = {"0": 5.0, "1": 5.0, "2": 900.0}
    errors = {"0": failed(RuntimeError("closed")), "1": failed(CollectiveError("all_gather #4 failed on rank 1"))}
    simulated = simulate(monkeypatch, seconds, errors)
    simulated.num_nodes = num_nodes
    with pytest.raises(CollectiveError, match="all_gather #4"):
        wait(seconds)
    assert simulated.now <= 5.0 + calls.POLL_S + limit


def test_an_actor_that_may_run_on_a_lost_node_only_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch, {"0": 5.0}, {"0": ActorUnschedulableError("the node does not exist any more")})
    with pytest.raises(WorkerError, match=r"rank 0 died in phase 'step': .*does not exist any more") as error_info:
        wait({"0": 5.0})
    assert error_info.value.died


def test_the_address_of_a_lost_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "The actor died because its node has died. Node Id: 4f\n\tthe node was terminated unexpectedly"
    context = messages.ActorDiedErrorContext(error_message=reason, actor_id=bytes(16), node_ip_address="10.0.0.2")
    simulate(monkeypatch, {"0": 5.0}, {"0": ActorDiedError(context)})
    with pytest.raises(
        WorkerError, match=r"^rank 0 died in phase 'step' with its node 10\.0\.0\.2: ActorDiedError: The actor"
    ):
        wait({"0": 5.0})


@pytest.mark.parametrize(
    ("node_is_lost", "dead_process", "text"),
    [(True, False, " with its node 10.0.0.2: Actor"), (False, True, ": Actor"), (False, False, ": Actor")],
)
def test_the_node_of_an_actor_with_a_reset_connection_is_named_once_ray_has_declared_it_dead(
    monkeypatch: pytest.MonkeyPatch, node_is_lost: bool, dead_process: bool, text: str
) -> None:
    clock = [0.0]
    declared_s = 7.0

    def nodes() -> list[dict[str, Any]]:
        alive = not (node_is_lost and clock[0] >= declared_s)
        return [{"NodeID": str(i), "Alive": alive or i == 1, "NodeManagerAddress": f"10.0.0.{i}"} for i in (1, 2)]

    def actors(_: str) -> dict[str, Any]:
        dead = (node_is_lost or dead_process) and clock[0] >= declared_s
        return {"Address": {"NodeID": "2"}, "State": "DEAD" if dead else "ALIVE"}

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    simulate(monkeypatch, {"0": 5.0}, {"0": ActorUnavailableError("Connection reset by peer", bytes(16))})
    monkeypatch.setattr(Deadline, "elapsed", lambda _: clock[0])
    monkeypatch.setattr(lost_node.ray, "nodes", nodes)
    monkeypatch.setattr(lost_node.state, "actors", actors)
    monkeypatch.setattr(lost_node.time, "sleep", sleep)
    with pytest.raises(WorkerError, match=f"^rank 0 died in phase 'step'{text}") as error_info:
        wait({"0": 0.0})
    assert error_info.value.died
    assert clock[0] == (declared_s if node_is_lost or dead_process else lost_node.DECLARED_S * scale())


def test_an_error_with_a_type_of_the_project_is_preferred_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"0": 5.0, "1": 6.0}
    errors = {"0": failed(RuntimeError("connection closed")), "1": failed(CheckpointError("no space"))}
    simulate(monkeypatch, seconds, errors)
    with pytest.raises(CheckpointError, match=r"^no space$"):
        wait(seconds)


def test_without_a_cause_the_first_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"0": 900.0, "1": 5.0}
    simulated = simulate(monkeypatch, seconds, {"1": failed(RuntimeError("bad shape"))})
    with pytest.raises(WorkerError, match=r"rank 1 failed in phase 'step': .*bad shape"):
        wait(seconds)
    assert simulated.now <= 5.0 + calls.POLL_S + calls.GRACE_S


def test_pending_ranks_are_reported_and_named_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"1": 900.0, "0": 900.0, "2": 0.0}
    simulated, reports = simulate(monkeypatch, seconds), list[str]()
    with pytest.raises(DeadlineExceeded, match="rank 0, rank 1"):
        wait(seconds, limit=20.0, waiting=reports.append)
    assert set(reports) == {"rank 0, rank 1"} and len(reports) >= 20
    assert simulated.now == 20.0 * scale()


def test_a_wait_that_begins_at_the_deadline_has_no_negative_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances between two readings of it; Ray refuses a negative timeout."""
    simulated = simulate(monkeypatch, {"0": 900.0})

    def elapsed(deadline: Deadline) -> float:
        simulated.now += 0.001
        return simulated.now

    monkeypatch.setattr(Deadline, "elapsed", elapsed)
    with pytest.raises(DeadlineExceeded, match="rank 0"):
        wait({"0": 900.0}, limit=0.0015 / scale())


def test_the_supervisor_bounds_the_time_of_the_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    line, supervisor = socket.socketpair()
    with line, supervisor:
        monkeypatch.setattr(driver_link, "_line", line)
        supervisor.settimeout(10 * scale())
        messages_sent: list[str] = []

        def put(value: str) -> str:
            messages_sent.append(supervisor.recv(65_536).decode())
            return value.upper()

        monkeypatch.setattr(calls.ray, "put", put)
        assert calls.put("prompts") == "PROMPTS"
        messages_sent.append(supervisor.recv(65_536).decode())
    begins, ends = map(json.loads, messages_sent)
    assert begins["waits_for"] == "Ray's object store"
    assert (begins["seconds"], begins["owner"], begins["phase"]) == (calls.STORE_S, "driver", "put")
    assert (begins["kind"], ends["kind"], begins["number"]) == ("call_begins", "call_ends", ends["number"])
