"""Choice of a node for an engine started during a run, and replacement of an engine whose actor cannot be restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from slime_like.cluster.workers import engine_starter
from slime_like.cluster.workers.engine_starter import EngineStarter, EngineTemplate
from slime_like.cluster.workers.engine_supervisor import RayEngineSupervisor
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.share import ManagerShare
from slime_like.errors import EngineError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.client import EngineClient

SPEC = EngineSpec("model", "cpu", "float32", 1, 64, 3, "/run/logs/engine_0.log", 60.0)


def node_id(number: int) -> str:
    """Return a node id as Ray writes it."""
    return f"{number:056x}"


def entry(number: int, *, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0, "memory": 1e9}
    return {
        "NodeID": node_id(number),
        "Alive": alive,
        "NodeManagerAddress": f"10.0.0.{number}",
        "Resources": resources,
    }


class RecordedStart:
    """Replacement for ``start_actor``. It records the options and arguments of each call."""

    def __init__(self) -> None:
        self.starts: list[tuple[Mapping[str, Any], tuple[Any, ...]]] = []

    def __call__(self, actor_class: type, **options: Any) -> Any:
        return lambda *arguments: self.starts.append((options, arguments)) or f"actor {len(self.starts)}"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RecordedStart:
    recorder = RecordedStart()
    monkeypatch.setattr(engine_starter, "start_actor", recorder)
    return recorder


def template(*trainer_nodes: str) -> EngineTemplate:
    return EngineTemplate(SPEC, "key", "stacks", {"A": "1"}, True, 1.0, frozenset(trainer_nodes))


def test_an_engine_is_started_on_the_live_node_with_the_fewest_engines(
    recorder: RecordedStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [entry(1), entry(2), entry(3), entry(4, alive=False)])
    starter = EngineStarter(template("10.0.0.1"), {}, {0: "10.0.0.2", 1: "10.0.0.4"})
    for index in (1, 2, 3):
        asyncio.run(starter.start(index))
    strategies = [options["scheduling_strategy"].node_id for options, _ in recorder.starts]
    assert strategies == [node_id(3), node_id(2), node_id(3)], "neither the trainer's node nor the dead one"
    options, (name, spec, key, _, env, _, gpus) = recorder.starts[1]
    assert gpus == (), "GPUs that are reserved during the run have no trainer rank"
    assert (name, spec.seed, spec.log_path, key, env) == ("engine 2", 5, "/run/logs/engine_2.log", "key", {"A": "1"})
    assert options["max_restarts"] == -1 and not options["scheduling_strategy"].soft
    monkeypatch.setattr(ray, "nodes", lambda: [entry(1)])
    asyncio.run(EngineStarter(template("10.0.0.1"), {}, {}).start(0))
    assert recorder.starts[-1][0]["scheduling_strategy"].node_id == node_id(1), "the trainer's, if no other is left"
    monkeypatch.setattr(ray, "nodes", lambda: [])
    with pytest.raises(EngineError, match="engine 7 cannot be started: the Ray cluster has no node"):
        asyncio.run(EngineStarter(template(), {}, {}).start(7))


def test_managers_that_add_engines_at_the_same_time_use_different_nodes(
    recorder: RecordedStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [entry(1), entry(2), entry(3)])
    hosts = {0: "10.0.0.1", 1: "10.0.0.1"}
    starters = [EngineStarter(template(), {}, hosts, ManagerShare(i, 2)) for i in range(2)]
    for index in range(2, 6):
        asyncio.run(starters[index % 2].start(index))
    strategies = [options["scheduling_strategy"].node_id for options, _ in recorder.starts]
    assert strategies == [node_id(2), node_id(3), node_id(3), node_id(2)], "node 1 has two engines"


class LostActor:
    """Fake handle of an actor that was lost, whose calls raise ``error``, or of its replacement."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.restart = self.ready = self.stop_server = self

    async def _answer(self) -> EngineAddress:
        if self._error is not None:
            raise self._error
        return EngineAddress("engine 0", "http://10.0.0.3:1", "key", 1)

    def remote(self) -> Any:
        return self._answer()


def connect(address: EngineAddress) -> EngineClient:
    """Return a client of the engine."""
    return EngineClient(address.url, admin_key=address.admin_key, name=address.name)


@pytest.mark.parametrize(
    ("error", "exit_summary"),
    [
        (ActorUnschedulableError("the node is dead"), "was lost with its node"),
        (RayActorError(error_msg="The actor died because its node has died. Node Id: 0"), "was lost with its node"),
        (
            RayActorError(error_msg="The actor died because of an error raised in its creation task, x\ny"),
            "was lost: the actor of engine 0 died: RayActorError: The actor died because of an error raised in its creation task, x",
        ),
    ],
)
def test_an_engine_whose_actor_is_lost_gets_another_actor(error: Exception, exit_summary: str) -> None:
    address = EngineAddress("engine 0", "http://10.0.0.2:1", "key", 1)
    lost_actor: Any = LostActor(error)

    async def start() -> Any:
        return LostActor()

    async def restart(supervisor: RayEngineSupervisor) -> str:
        client, reason = await supervisor.restart()
        await client.close()
        return f"{client.url}: {reason}"

    supervisor = RayEngineSupervisor(lost_actor, address, RolloutConfig(), connect, start)
    assert asyncio.run(restart(supervisor)) == f"http://10.0.0.3:1: {exit_summary}"
    with pytest.raises(EngineError, match=f"the actor of engine 0 died: {type(error).__name__}: The actor "):
        asyncio.run(restart(RayEngineSupervisor(lost_actor, address, RolloutConfig(), connect)))
    stop = RayEngineSupervisor(lost_actor, address, RolloutConfig(), connect).stop_server()
    asyncio.run(stop)  # the server has ended with its actor
