"""Engines that wait for weights while the driver waits for a rollout get them, and no others do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import ray

from slime_like.cluster.run.rollouts import EngineRollout


class Manager:
    """Ray's handle of a rollout manager, as far as the driver uses it; answers are there when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collected: Future[str] = Future()
        self.starving: list[Future[None]] = []
        self.collect, self.starved = _Verb(lambda: self.collected), _Verb(self._ask)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", lambda ref, timeout: ref.result(timeout=0))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]

    def _ask(self) -> Future[None]:
        self.starving.append(Future())
        return self.starving[-1]

    def _wait(self, refs: Sequence[Future[Any]], *, timeout: float, num_returns: int = 1) -> Any:
        """A wait that takes time is one in which the rollout is made."""
        if timeout and not any(ref.done() for ref in refs):
            self.collected.set_result("rollout")
        return [ref for ref in refs if ref.done()], [ref for ref in refs if not ref.done()]


class _Verb:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self, *_: object) -> Any:
        return self._answer()


def test_an_engine_that_comes_back_to_a_rollout_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, fed = Manager(monkeypatch), list[int]()
    rollout = EngineRollout(manager, 60.0, lambda: fed.append(len(manager.starving)))
    manager.starved = _Verb(lambda: _done() if not fed else manager._ask())
    assert rollout.collect(0) == "rollout"  # pyright: ignore[reportComparisonOverlap]
    assert fed == [0]


def test_what_a_push_between_two_rollouts_has_fed_is_not_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, fed = Manager(monkeypatch), list[int]()
    rollout = EngineRollout(manager, 60.0, lambda: fed.append(0))
    rollout.collect(0)
    (asked,) = manager.starving
    asked.set_result(None)  # while the trainer steps; then it pushes
    manager.collected = Future()
    rollout.collect(1)
    assert len(manager.starving) == 2
    assert fed == []


def _done() -> Future[None]:
    found: Future[None] = Future()
    found.set_result(None)
    return found
