"""Rollout managers as the driver calls them: weight pushes during a rollout, and the number of engines of all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayActorError

from slime_like.cluster.run.rollouts import EngineRollout, ManagerGroup
from slime_like.cluster.run.sync import EngineSync, in_order
from slime_like.cluster.workers import calls
from slime_like.cluster.workers.rollout_actor import RolloutActor
from slime_like.config.schema.run import WeightsConfig
from slime_like.errors import ConfigError, DeadlineExceeded, EngineLost, WeightSyncError, WorkerError
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
    assert rollout.fewest_engines == 6
    assert [manager.calls[0] for manager in managers] == [("resize_engines", (6,))] * 2
    assert change.startswith("6 engines; rollout manager 0: resize_engines (6,); rollout manager 1: ")
    for number, choice in ((5, "4 or 6"), (1, "2")):
        with pytest.raises(ConfigError, match=rf"engines={number}: with rollout.num_managers=2 .* request {choice}$"):
            rollout.resize(number)
    assert rollout.fewest_engines == 6, "refused requests remove no engine"
    rollout.resize(4)
    rollout.resize(8)
    assert rollout.fewest_engines == 4


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


@pytest.mark.usefixtures("ray_of_futures")
@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (EngineLost("engine 0 died"), DeadlineExceeded, "for rollout manager 1 in phase 'push/begin_push'"),
        (WeightSyncError("old weights"), WeightSyncError, "old weights"),
    ],
)
def test_a_push_does_not_start_over_while_a_manager_hangs(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], words: str
) -> None:
    """A lost engine must not hide a manager that hangs: the repeated calls would wait for it again, one deadline each."""
    monkeypatch.setattr(calls, "SETTLE_S", 0.05)
    hung = AnsweringManager()
    hung.answer = lambda name, arguments: Future()  # pyright: ignore[reportAttributeAccessIssue]
    managers = ManagerGroup(cast(Any, (AnsweringManager(error), hung)))
    with pytest.raises(expected, match=words):
        managers.call(Deadline("driver", "push/begin_push", 0.1), RolloutActor.begin_push)


def test_engines_of_all_managers_are_pushed_to_in_the_order_of_their_indices() -> None:
    assert [address.name for address in in_order([engines(0, 2, 10), engines(1, 11)])] == [
        f"engine {i}" for i in (0, 1, 2, 10, 11)
    ]


@pytest.mark.usefixtures("ray_of_futures")
def test_a_manager_that_dies_is_named_while_the_others_still_work() -> None:
    busy, dead = AnsweringManager(), AnsweringManager(RayActorError())
    busy.answer = lambda name, arguments: Future()  # pyright: ignore[reportAttributeAccessIssue]
    managers = ManagerGroup(cast(Any, (busy, dead)))
    with pytest.raises(WorkerError, match="rollout manager 1 died in phase 'collect'"):
        EngineRollout(managers, cast(Any, None), 60.0).collect(0)
    with pytest.raises(WorkerError, match="rollout manager 1 died in phase 'push/begin_push'"):
        managers.call(Deadline("driver", "push/begin_push", 60.0), RolloutActor.begin_push)


@pytest.mark.usefixtures("ray_of_futures")
def test_every_manager_that_hangs_is_named_at_the_deadline() -> None:
    """Calls of ``wait_until_push_needed`` are always pending, and are not named in the error."""
    managers = [AnsweringManager() for _ in range(3)]
    for hung in managers[::2]:
        hung.answer = lambda name, arguments: Future()  # pyright: ignore[reportAttributeAccessIssue]
    rollout = EngineRollout(ManagerGroup(cast(Any, tuple(managers))), cast(Any, None), 0.1)
    with pytest.raises(DeadlineExceeded, match="for rollout manager 0, rollout manager 2 in phase 'collect'"):
        rollout.collect(0)


class ScriptedManager(AnsweringManager):
    """Fake Ray handle whose calls return or raise the next reply for their method, and are pending without one."""

    def __init__(self, **replies: Sequence[object]) -> None:
        super().__init__()
        self.replies = {name: list(values) for name, values in replies.items()}

    def answer(self, name: str, arguments: tuple[object, ...]) -> Future[Any]:
        self.calls.append((name, arguments))
        future: Future[Any] = Future()
        if queue := self.replies.get(name):
            reply = queue.pop(0)
            if isinstance(reply, Exception):
                future.set_exception(reply)
            else:
                future.set_result(reply)
        return future

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.mark.usefixtures("ray_of_futures")
def test_results_are_in_the_order_of_the_managers_and_not_of_their_replies(tmp_path: Path) -> None:
    """Each state of a checkpoint belongs to one manager."""
    late_reply: Future[Any] = Future()
    late, early = AnsweringManager(), ScriptedManager(save_state=[{"cursor": 1}])
    late.answer = lambda name, arguments: late_reply if name == "save_state" else Future()  # pyright: ignore[reportAttributeAccessIssue]
    selection = SimpleNamespace(
        save=lambda path: late_reply.done() or pytest.fail(f"{path} before the managers' files")
    )  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
    threading.Timer(0.05, late_reply.set_result, ({"cursor": 0},)).start()
    EngineRollout(ManagerGroup(cast(Any, (late, early))), cast(Any, selection), 60.0).save(tmp_path, 3)
    state = json.loads((tmp_path / "rollout" / "state_3.json").read_text())
    assert state == {"managers": [{"cursor": 0}, {"cursor": 1}]}


@pytest.mark.usefixtures("ray_of_futures")
def test_one_push_serves_the_restarted_engines_of_all_managers_while_one_collects() -> None:
    """The first manager has completed its part of the rollout; the only engine of each manager was restarted."""
    collected: Future[Any] = Future()
    done = ScriptedManager(collect=["part 0"], wait_until_push_needed=[None])
    busy = ScriptedManager(wait_until_push_needed=[None])
    scripted_answer = busy.answer
    busy.answer = lambda name, arguments: collected if name == "collect" else scripted_answer(name, arguments)  # pyright: ignore[reportAttributeAccessIssue]
    pushes: list[int] = []

    def push() -> None:
        pushes.append(len(done.calls))
        collected.set_result("part 1")

    selection = SimpleNamespace(select=lambda _, parts: parts)  # pyright: ignore[reportUnknownLambdaType]
    rollout = EngineRollout(ManagerGroup(cast(Any, (done, busy))), cast(Any, selection), 60.0, push)
    assert rollout.collect(0) == ["part 0", "part 1"]  # pyright: ignore[reportComparisonOverlap]
    assert len(pushes) == 1


def engines(*indices: int) -> tuple[EngineAddress, ...]:
    return tuple(EngineAddress(f"engine {i}", "http://h", "key", 1) for i in indices)


def push_with(*managers: ScriptedManager, max_losses: int = 1) -> list[list[str]]:
    """Push version 5 with ``managers``; return the engines of each transfer. The probe is off."""
    transfers: list[list[str]] = []

    def send_weights(addresses: Sequence[EngineAddress], _: object) -> tuple[()]:
        transfers.append([address.name for address in addresses])
        return ()

    trainer: Any = SimpleNamespace(send_weights=send_weights)
    residency: Any = SimpleNamespace(enter=lambda _: None)  # pyright: ignore[reportUnknownLambdaType]
    config = replace(WeightsConfig(), probe_sequences=0)
    group = ManagerGroup(cast(Any, managers))
    EngineSync(trainer, group, {}, cast(Any, None), config, 0.1, 64, max_losses, residency).push(5)
    return transfers


@pytest.mark.usefixtures("ray_of_futures")
def test_a_push_that_one_manager_cannot_commit_starts_over_on_all_managers() -> None:
    first = ScriptedManager(begin_push=[engines(0, 2)] * 2, commit_push=[0, 0])
    lost = EngineLost("no remaining engine has the weights of version 5")
    second = ScriptedManager(begin_push=[engines(1)] * 2, commit_push=[lost, 1], admit_proven=[None])
    first.replies["admit_proven"] = [None]
    assert push_with(first, second) == [["engine 0", "engine 1", "engine 2"]] * 2
    for manager in (first, second):
        expected = ["begin_push", "commit_push", "begin_push", "commit_push", "admit_proven"]
        assert manager.names() == expected, "an engine that one manager has added is admitted"
        assert ("commit_push", (5,)) in manager.calls


@pytest.mark.usefixtures("ray_of_futures")
@pytest.mark.parametrize(
    ("error", "num_attempts"),
    [(WeightSyncError("a parameter was not written"), 1), (EngineLost("engine 1 died"), 3)],
)
def test_a_push_that_fails_is_aborted_by_every_manager(error: Exception, num_attempts: int) -> None:
    """Two engines may be lost once each; the third loss ends the push."""
    first = ScriptedManager(begin_push=[engines(0)] * 3, commit_push=[0] * 3, abort_push=[None])
    second = ScriptedManager(begin_push=[engines(1)] * 3, commit_push=[error] * 3, abort_push=[None])
    with pytest.raises(type(error), match=str(error)):
        push_with(first, second)
    for manager in (first, second):
        assert manager.names() == ["begin_push", "commit_push"] * num_attempts + ["abort_push"]
