"""Weight pushes to restarted engines while the driver waits for a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
import ray

from slime_like.cluster.run.rollouts import EngineRollout


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


def test_an_engine_restarted_during_a_rollout_gets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pushes = ControlledManager(monkeypatch), list[int]()
    rollout = EngineRollout(cast(Any, manager), 60.0, lambda: pushes.append(len(manager.starving)))
    manager.wait_until_push_needed = _Verb(lambda: _done() if not pushes else manager._ask())
    assert rollout.collect(0) == "rollout"  # pyright: ignore[reportComparisonOverlap]
    assert pushes == [0]


def test_an_engine_served_by_the_regular_push_gets_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, pushes = ControlledManager(monkeypatch), list[int]()
    rollout = EngineRollout(cast(Any, manager), 60.0, lambda: pushes.append(0))
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
