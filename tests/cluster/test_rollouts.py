"""Rollout managers as the driver calls them: weight pushes during a rollout, and a number of engines for all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayActorError

from slime_like.cluster.run.rollouts import EngineRollout
from slime_like.cluster.run.sync import in_order
from slime_like.cluster.workers.manager_group import ManagerGroup
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.errors import ConfigError, EngineLost, WeightSyncError, WorkerError
from slime_like.interfaces import EngineAddress
from slime_like.util.deadline import Deadline


class ControlledManager:
    """Fake Ray handle of the rollout manager; the test decides when its calls return."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collected: Future[str] = Future()
        self.starving: list[Future[None]] = []
        self.collect, self.wait_until_push_needed = _Verb(lambda: self.collected), _Verb(self._ask)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", lambda ref, timeout: ref.result(timeout=0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]

    def _ask(self) -> Future[None]:
        self.starving.append(Future())
        return self.starving[-1]

    def _wait(self, refs: Sequence[Future[Any]], *, timeout: float, num_returns: int = 1) -> Any:
        """Complete the rollout if nothing else is ready."""
        if timeout and not any(ref.done() for ref in refs):
            self.collected.set_result("rollout")
        return [ref for ref in refs if ref.done()], [ref for ref in refs if not ref.done()]


class _Verb:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: object) -> Any:
        return self._answer()


class _FirstPart:
    """Selection that returns the first manager's part."""

    def select(self, _: int, parts: Sequence[Any]) -> Any:
        return parts[0]


def rollout_of(manager: ControlledManager, push: Callable[[], object]) -> EngineRollout:
    return EngineRollout(ManagerGroup((cast(Any, manager),)), cast(Any, _FirstPart()), 60.0, push)


def test_an_engine_restarted_during_a_rollout_gets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pushes = ControlledManager(monkeypatch), list[int]()
    rollout = rollout_of(manager, lambda: pushes.append(len(manager.starving)))
    manager.wait_until_push_needed = _Verb(lambda: _done() if not pushes else manager._ask())
    assert rollout.collect(0) == "rollout"  # pyright: ignore[reportComparisonOverlap]
    assert pushes == [0]


def test_an_engine_served_by_the_regular_push_gets_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pushes = ControlledManager(monkeypatch), list[int]()
    rollout = rollout_of(manager, lambda: pushes.append(0))
    rollout.collect(0)
    (request,) = manager.starving
    request.set_result(None)  # while the trainer steps; then it pushes
    manager.collected = Future()
    rollout.collect(1)
    assert len(manager.starving) == 2
    assert pushes == []


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


class AnsweringManager:
    """Fake Ray handle whose calls are complete at once, or raise ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return _RemoteMethod(self, name)

    def answer(self, name: str, arguments: tuple[object, ...]) -> Future[Any]:
        self.calls.append((name, arguments))
        future: Future[Any] = Future()
        if name == "wait_until_push_needed":
            return future
        if self._error is None:
            future.set_result(f"{name} {arguments}")
        else:
            future.set_exception(self._error)
        return future


class _RemoteMethod:
    def __init__(self, manager: AnsweringManager, name: str) -> None:
        self._manager, self._name = manager, name

    def remote(self, *arguments: object) -> Future[Any]:
        return self._manager.answer(self._name, arguments)


@pytest.fixture
def ray_of_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_one(refs: Sequence[Future[Any]], *, timeout: float, num_returns: int = 1) -> Any:
        ready_refs, pending = wait(refs, timeout, FIRST_COMPLETED)
        return [ref for ref in refs if ref in ready_refs], list(pending)

    monkeypatch.setattr(ray, "wait", wait_for_one)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref.result(timeout=0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]


@pytest.mark.usefixtures("ray_of_futures")
def test_engines_are_spread_evenly_over_the_managers() -> None:
    managers = [AnsweringManager(), AnsweringManager()]
    rollout = EngineRollout(ManagerGroup(cast(Any, tuple(managers))), cast(Any, None), 60.0)
    change = rollout.resize(6)
    assert [manager.calls[0] for manager in managers] == [("resize_engines", (6,))] * 2
    assert change.startswith("6 engines; rollout manager 0: resize_engines (6,); rollout manager 1: ")
    for number, choice in ((5, "4 or 6"), (1, "2")):
        with pytest.raises(ConfigError, match=rf"engines={number}: with rollout.num_managers=2 .* request {choice}$"):
            rollout.resize(number)


@pytest.mark.usefixtures("ray_of_futures")
def test_a_push_starts_over_only_when_no_manager_works_on_it_any_more() -> None:
    """An error ends a call only once the calls to the other managers have ended, and a fatal error comes before a lost engine."""
    pending = AnsweringManager()
    pending_call: Future[Any] = Future()
    pending.answer = lambda name, arguments: pending_call  # pyright: ignore[reportAttributeAccessIssue]
    failing_manager = AnsweringManager(EngineLost("engine 1 died"))

    def call(*managers: AnsweringManager, seconds: float) -> list[Any]:
        group = ManagerGroup(cast(Any, managers))
        return group.call(Deadline("driver", "push", seconds), RolloutActor.begin_push)

    threading.Timer(0.05, pending_call.set_result, ((),)).start()
    start = time.monotonic()
    with pytest.raises(EngineLost, match="engine 1 died"):
        call(failing_manager, pending, seconds=30)
    assert pending_call.done() and time.monotonic() - start >= 0.04
    with pytest.raises(WeightSyncError):
        call(failing_manager, AnsweringManager(WeightSyncError("old weights")), seconds=30)
    assert call(AnsweringManager(), AnsweringManager(), seconds=30) == ["begin_push ()"] * 2


def test_engines_of_all_managers_are_pushed_to_in_the_order_of_their_indices() -> None:
    parts = [[EngineAddress(f"engine {i}", "http://h", "key", 1) for i in indices] for indices in ((0, 2, 10), (1, 11))]
    assert [address.name for address in in_order(parts)] == [f"engine {i}" for i in (0, 1, 2, 10, 11)]


@pytest.mark.usefixtures("ray_of_futures")
def test_a_manager_that_dies_is_named_while_the_others_still_work() -> None:
    busy, dead = AnsweringManager(), AnsweringManager(RayActorError())
    busy.answer = lambda name, arguments: Future()  # pyright: ignore[reportAttributeAccessIssue]
    managers = ManagerGroup(cast(Any, (busy, dead)))
    with pytest.raises(WorkerError, match="rollout manager 1 died in phase 'collect'"):
        EngineRollout(managers, cast(Any, None), 60.0).collect(0)
    with pytest.raises(WorkerError, match="rollout manager 1 died in phase 'push/begin_push'"):
        managers.call(Deadline("driver", "push/begin_push", 60.0), RolloutActor.begin_push)
