"""Engines on several nodes: the choice of nodes, the loss of a part, and the settings of each node's server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from slime_like.cluster.workers import engine_actor, engine_parts, engine_starter, engine_supervisor
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_part import EnginePart
from slime_like.cluster.workers.engine_parts import EngineParts, NodeSlot, PartSettings
from slime_like.cluster.workers.engine_starter import EngineStarter, EngineTemplate
from slime_like.cluster.workers.engine_supervisor import RayEngineSupervisor
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import DeadlineExceeded, EngineError, EngineNodeLost
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.environment import child_environment
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like.rollout.engine.node import RENDEZVOUS_SCHEME, EngineNode
from slime_like.util.deadline import Deadline, scale
from tests.cluster.test_engine_starter import RecordedStart, connect, entry, node_id

SPEC = EngineSpec("model", "cpu", "float32", 4, 64, 3, "/run/logs/engine_0.log", 60.0, num_nodes=2)
HOSTS = ("10.0.0.1", "10.0.0.2")
KILLED = EngineError("engine did not start: it was killed by SIGKILL")


def slot(number: int) -> NodeSlot:
    return NodeSlot(node_id(number), f"10.0.0.{number}")


def nodes_of(recorder: RecordedStart) -> list[str]:
    """Return the nodes of the engine that was started last."""
    options, (*_, other_nodes, _gpus) = recorder.starts[-1]
    return [options["scheduling_strategy"].node_id, *(slot_elsewhere.node_id for slot_elsewhere in other_nodes)]


def test_a_started_engine_has_different_nodes_and_keeps_those_that_the_run_has_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = RecordedStart()
    monkeypatch.setattr(engine_starter, "start_actor", recorder)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "nodes", lambda: [entry(1), entry(2), entry(3), entry(4)])
    template = EngineTemplate(SPEC, "key", "stacks", {}, True, 1.0, frozenset({"10.0.0.1"}), ((slot(2), slot(3)),))
    starter = EngineStarter(template, {}, {0: "10.0.0.2"})
    asyncio.run(starter.start(1))
    assert nodes_of(recorder) == [node_id(4), node_id(2)], "the node without engines first, and not the trainer's"
    monkeypatch.setattr(ray, "nodes", lambda: [entry(1), entry(2, alive=False), entry(3), entry(4)])
    asyncio.run(starter.start(0))
    assert nodes_of(recorder) == [node_id(3), node_id(4)]
    monkeypatch.setattr(ray, "nodes", lambda: [entry(3)])
    with pytest.raises(EngineError, match=r"engine 0 cannot be started: it needs 1 more node with CPUs, and .* has 0"):
        asyncio.run(starter.start(0))


class Answers:
    """Fake handle of an actor whose calls fail with ``error`` or return ``value``."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self._value, self._error = value, error
        self.restart = self.ready = self

    async def _answer(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def remote(self) -> Any:
        return self._answer()


def test_an_engine_that_lost_one_of_its_nodes_gets_another_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    address = EngineAddress("engine 0", "http://10.0.0.3:1", "key", 4, 2)
    lost_actor: Any = Answers(error=EngineNodeLost("its part on node 10.0.0.2 died\nfirst node: killed"))

    async def restart(*start: Callable[[], Any], **keys: float) -> tuple[EngineClient, str]:
        supervisor = RayEngineSupervisor(lost_actor, address, replace(RolloutConfig(), **keys), connect, *start)
        client, reason = await supervisor.restart()
        await client.close()
        return client, reason

    async def start() -> Any:
        await asyncio.sleep(0.2)
        return Answers(address)

    assert asyncio.run(restart(start))[1] == "ended; its part on node 10.0.0.2 died"
    monkeypatch.setattr(engine_supervisor, "STOP_S", 0.0)
    start_s = 0.1 / scale()
    assert asyncio.run(restart(start, start_deadline_s=start_s))[1], "the wait for a node does not count"
    with pytest.raises(EngineNodeLost):
        asyncio.run(restart())


class FakeRay:
    """Replacement for Ray's calls in ``engine_parts``. Each call returns a future that the test completes."""

    def __init__(self) -> None:
        self.ends: list[Future[str]] = []
        self.ready_error: Exception | None = None  # raised by ``EnginePart.ready``
        self.stopped: dict[str, Any] = {}  # actor -> result or error of ``EnginePart.stopped_pids``
        self.killed = 0
        self.started: list[tuple[Mapping[str, Any], tuple[Any, ...]]] = []

    def start_actor(self, actor_class: type, **options: Any) -> Any:
        return lambda *arguments: self.started.append((options, arguments)) or f"actor {len(self.started)}"

    def call(self, actor: Any, method: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if method is EnginePart.wait_for_end:
            self.ends.append(future)
        elif method is EnginePart.ready and self.ready_error is not None:
            future.set_exception(self.ready_error)
        elif isinstance(error := self.stopped.get(actor), Exception):
            future.set_exception(error)
        else:
            future.set_result(self.stopped.get(actor, ()))
        return future

    def wait(self, refs: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready_refs, pending = wait(refs, timeout=timeout, return_when=FIRST_COMPLETED)
        return list(ready_refs), list(pending)

    def get(self, ref: Future[Any], timeout: float | None = None) -> Any:
        return ref.result(timeout)

    def kill(self, actor: Any) -> None:
        self.killed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(engine_parts, "start_actor", fake.start_actor)
    monkeypatch.setattr(engine_parts, "call", fake.call)
    for name in ("wait", "get", "kill"):
        monkeypatch.setattr(ray, name, getattr(fake, name))
    return fake


@pytest.fixture
def end_event() -> threading.Event:
    return threading.Event()


@pytest.fixture
def parts(fake: FakeRay, end_event: threading.Event) -> Iterator[EngineParts]:
    settings = PartSettings("engine 0", replace(SPEC, num_nodes=3), "key", "stacks", {})
    parts = EngineParts(settings, [slot(2), slot(3)], EngineNode(0, HOSTS, "10.0.0.1:1"), end_event.set)
    yield parts
    parts.stop(lambda: None)
    assert fake.killed == 2


def test_each_node_has_a_rank_and_a_log(parts: EngineParts, fake: FakeRay) -> None:
    assert [arguments[5].rank for _, arguments in fake.started] == [1, 2]
    assert [Path(arguments[1].log_path).name for _, arguments in fake.started] == [
        "engine_0_node1.log",
        "engine_0_node2.log",
    ]
    assert [options["scheduling_strategy"].node_id for options, _ in fake.started] == [node_id(2), node_id(3)]
    parts.raise_loss(KILLED)


def test_the_end_of_a_server_on_another_node_ends_the_engine(
    parts: EngineParts, fake: FakeRay, end_event: threading.Event
) -> None:
    fake.ends[1].set_result("was killed by SIGKILL")
    assert end_event.wait(10)
    assert parts.cause_of_loss == "its part on node 10.0.0.3 was lost: was killed by SIGKILL"
    with pytest.raises(EngineError) as error:
        parts.raise_loss(KILLED)
    assert not isinstance(error.value, EngineNodeLost), "it can be started on the same nodes"
    assert str(error.value) == f"{parts.cause_of_loss}\nfirst node: {KILLED}", "one is the cause of the other"


def test_a_lost_actor_ends_the_engine_which_needs_another_node(
    parts: EngineParts, fake: FakeRay, end_event: threading.Event
) -> None:
    fake.ends[0].set_exception(ActorUnschedulableError("the node is dead"))
    assert end_event.wait(10)
    with pytest.raises(EngineNodeLost, match=r"10\.0\.0\.2 was lost: .*the node is dead"):
        parts.raise_loss(KILLED)


def test_stopped_processes_are_listed_although_another_part_is_lost(parts: EngineParts, fake: FakeRay) -> None:
    fake.stopped = {"actor 1": RayActorError(), "actor 2": (7, 9)}
    assert parts.stopped_pids() == (7, 9)


def test_a_part_that_is_lost_during_the_start_needs_another_node_unless_the_engine_is_stopped(
    parts: EngineParts, fake: FakeRay
) -> None:
    deadline = Deadline("engine 0", "engine start", 60.0)
    parts.wait_ready(deadline)
    fake.ready_error = ActorUnschedulableError("the node is dead")
    with pytest.raises(
        EngineNodeLost, match=r"its part on node 10\.0\.0\.[23] died in phase 'engine start': .*node is dead"
    ):
        parts.wait_ready(deadline)
    with pytest.raises(
        DeadlineExceeded, match=rf"engine 0 waited {60 * scale():.0f} s for its part on node 10\.0\.0\.2"
    ):
        parts.wait_ready(replace(deadline, started=deadline.started - 60 * scale()))
    parts.stop(lambda: None)
    fake.killed = 0
    with pytest.raises(EngineError) as error:
        parts.wait_ready(deadline)
    assert not isinstance(error.value, EngineNodeLost), "its actors have been killed"


class FakeServer:
    """Fake ``EngineServer`` that records its stop."""

    rendezvous = "10.0.0.1:1"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stopped = False

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True


def test_a_first_node_whose_parts_cannot_be_started_keeps_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[FakeServer] = []

    def fail(*_: Any) -> None:
        raise EngineError("no part")

    monkeypatch.setattr(engine_actor, "prepare_process", lambda *_: None)
    monkeypatch.setattr(engine_actor, "get_node_ip_address", lambda: HOSTS[0])
    monkeypatch.setattr(engine_actor, "EngineServer", lambda *_, **__: servers.append(FakeServer()) or servers[-1])
    monkeypatch.setattr(engine_actor, "EngineParts", fail)
    with pytest.raises(EngineError, match="no part"):
        EngineActor("engine 0", SPEC, "key", "stacks", {}, [slot(2)])
    assert [server.stopped for server in servers] == [True]


class FakeGroup:
    """Fake placement group whose bundles are reserved at once."""

    async def ready(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ActorUnschedulableError("the node is dead"), r"no answer from its reserved GPUs: .*the node is dead"),
        ((node_id(2), "0,1"), r"node 0+2 was lost after its GPUs were reserved"),
    ],
)
def test_a_node_that_is_lost_after_its_gpus_were_reserved_is_an_error_of_the_engine(
    answer: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error would end the run instead of counting as a failed restart."""
    removed: list[Any] = []
    kills: list[Any] = []
    group = FakeGroup()
    monkeypatch.setattr(engine_starter, "start_actor", RecordedStart())
    monkeypatch.setattr(engine_starter, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(engine_starter, "remove_placement_group", removed.append)
    monkeypatch.setattr(
        engine_starter, "call", lambda *_: Answers(answer, answer if isinstance(answer, Exception) else None).remote()
    )
    monkeypatch.setattr(ray, "kill", kills.append)
    monkeypatch.setattr(ray, "nodes", lambda: [entry(3)])
    spec = replace(SPEC, device="cuda", tp=2, num_nodes=1)
    starter = EngineStarter(EngineTemplate(spec, "key", "stacks", {}, True, 1.0), {}, {})

    async def start_and_end() -> None:
        with pytest.raises(EngineError, match=f"engine 5 cannot be started: {message}"):
            await starter.start(5)
        assert kills == ["actor 1"], "the probe"
        await starter.end(5)

    asyncio.run(start_and_end())
    assert removed == [group]


@pytest.mark.parametrize(("lost_node", "nodes"), [(3, [2, 4]), (2, [3, 4])])
def test_gpus_for_a_lost_part_are_on_a_node_that_the_engine_does_not_have(
    lost_node: int, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is on nodes 2 and 3. Either may be lost, also the first one, with the actor that owns the engine."""
    groups: list[tuple[Any, Mapping[str, Any]]] = []
    recorder = RecordedStart()

    def reserve(bundles: Any, **options: Any) -> FakeGroup:
        groups.append((bundles, options))
        return FakeGroup()

    monkeypatch.setattr(engine_starter, "start_actor", recorder)
    monkeypatch.setattr(engine_starter, "placement_group", reserve)
    monkeypatch.setattr(engine_starter, "call", lambda *_: Answers((node_id(4), "0,1")).remote())
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "nodes", lambda: [entry(number, alive=number != lost_node) for number in (1, 2, 3, 4)])
    slots = tuple(replace(slot(number), gpus="2,3") for number in (2, 3))
    template = EngineTemplate(replace(SPEC, device="cuda"), "key", "stacks", {}, True, 1.0, frozenset(), (slots,))
    asyncio.run(EngineStarter(template, {}, {0: "10.0.0.2"}).start(0))
    assert nodes_of(recorder) == [node_id(number) for number in nodes]
    selector = {"ray.io/node-id": f"!in({node_id(nodes[0])})"}
    assert groups == [([{"GPU": 2, "CPU": 2}], {"strategy": "STRICT_SPREAD", "bundle_label_selector": [selector]})]
    _, (_, _, _, _, env, parts_elsewhere, _) = recorder.starts[-1]
    assert env == {"SLIME_LIKE_ENGINE_GPUS": "2,3"} and [part.gpus for part in parts_elsewhere] == ["0,1"]


def test_servers_of_all_nodes_meet_at_the_first_and_accept_only_their_addresses() -> None:
    node = EngineNode(1, HOSTS, "10.0.0.1:25000")
    environment = child_environment(SPEC, "/scratch", "127.0.0.1", node)
    assert environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == f"{RENDEZVOUS_SCHEME}://10.0.0.1:25000"
    assert environment["SGLANG_ZMQ_ALLOWED_PEERS"] == "10.0.0.1,10.0.0.2"
    assert environment["SGLANG_HOST_IP"] == environment["SGLANG_ZMQ_SOURCE_IP"] == "127.0.0.1"
    assert "SGLANG_ZMQ_ALLOWED_PEERS" not in child_environment(SPEC, "/scratch")
    arguments = server_arguments(EngineLaunch(SPEC, "key", "10.0.0.2", 1, 1, node.rendezvous))
    assert (arguments["nnodes"], arguments["node_rank"], arguments["dist_init_addr"]) == (2, 1, "10.0.0.1:25000")
    assert "nnodes" not in server_arguments(EngineLaunch(replace(SPEC, num_nodes=1), "key", "10.0.0.2", 1))


def test_an_engine_on_several_nodes_reads_no_shared_memory() -> None:
    address = EngineAddress("engine 0", "http://10.0.0.1:1", "key", 4, 2)
    assert EngineClient.at(address).host == "" and EngineClient.at(replace(address, num_nodes=1)).host == "10.0.0.1"


def test_a_part_that_ends_while_the_first_node_stops_is_not_a_loss(
    parts: EngineParts, fake: FakeRay, end_event: threading.Event
) -> None:
    """A rank of another node fails when the connection to the first node closes."""

    def stop_first() -> None:
        fake.ends[0].set_result("the process of a rank has ended")
        assert not end_event.wait(2 * engine_parts.POLL_S), "the engine is killed during its stop"

    parts.stop(stop_first)
    fake.killed = 0
    assert parts.cause_of_loss == ""
