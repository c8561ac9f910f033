"""Order in which trainer and engines move their memory before each phase of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from slime_like.cluster.run import sync
from slime_like.cluster.run.residency import Residency, pushes_within
from slime_like.cluster.run.sync import EngineSync
from slime_like.config.schema.residency import COLLECT, PUSH, SAVE, STEP
from slime_like.config.schema.run import WeightsConfig

ALL = ("weights", "gradients", "optimizer")


@dataclass
class Side:
    """Fake role or engines that record their calls."""

    name: str
    calls: list[tuple[str, Any]]
    fails: bool = False

    def keep_on_device(self, parts: Any) -> None:
        self._record(tuple(parts))

    def enter(self, phase: str) -> None:
        self._record(phase)

    def _record(self, value: Any) -> None:
        self.calls.append((self.name, value))
        if self.fails:
            self.fails = False
            raise MemoryError(self.name)


def sides(*, engines: bool = True, actor: bool = True) -> tuple[Residency, list[tuple[str, Any]]]:
    calls: list[tuple[str, Any]] = []
    residency = Residency(
        Side("actor", calls) if actor else None,
        (Side("critic", calls),) if actor else (),
        Side("engines", calls) if engines else None,  # pyright: ignore[reportArgumentType]
    )
    return residency, calls


def entered(residency: Residency, calls: list[tuple[str, Any]], phase: str) -> list[tuple[str, Any]]:
    calls.clear()
    residency.enter(phase)
    return list(calls)


def test_memory_is_given_up_before_it_is_taken() -> None:
    residency, calls = sides()
    assert entered(residency, calls, STEP) == [("engines", STEP)], "a new rank has its whole state on the device"
    assert entered(residency, calls, PUSH) == [("critic", ()), ("actor", ("weights",))], "the push moves the engines"
    assert entered(residency, calls, COLLECT) == [("critic", ()), ("actor", ())]
    assert entered(residency, calls, STEP) == [("engines", STEP), ("critic", ALL), ("actor", ALL)]
    assert entered(residency, calls, STEP) == []
    residency.enter(PUSH)
    parts = ("weights", "optimizer")
    assert entered(residency, calls, SAVE) == [("engines", SAVE), ("critic", parts), ("actor", parts)]
    assert entered(residency, calls, COLLECT) == [("critic", ()), ("actor", ()), ("engines", COLLECT)]
    assert [metric.name for metric in residency.drain_metrics()] == ["perf/offload_time"]


def test_a_side_that_stays_gets_no_call() -> None:
    for engines, actor, names in (
        (False, True, {"actor", "critic"}),
        (True, False, {"engines"}),
        (False, False, set()),
    ):
        residency, calls = sides(engines=engines, actor=actor)
        for phase in (STEP, PUSH, SAVE, COLLECT, STEP):
            residency.enter(phase)
        assert {name for name, _ in calls} == names
        assert len(residency.drain_metrics()) == bool(names)


def test_after_a_failed_move_the_next_phase_moves_everything() -> None:
    residency, calls = sides()
    residency.enter(STEP)
    assert isinstance(residency.actor, Side)
    residency.actor.fails = True
    with pytest.raises(MemoryError):
        residency.enter(PUSH)
    assert entered(residency, calls, STEP) == [("critic", ALL), ("actor", ALL)]


def test_a_rollout_continues_after_a_push_for_a_restarted_engine() -> None:
    residency, calls = sides()
    residency.enter(COLLECT)
    calls.clear()

    def push() -> None:
        residency.enter(PUSH)
        calls.append(("push", None))

    pushes_within(push, residency)()
    assert calls[:2] == [("critic", ()), ("actor", ("weights",))]
    assert calls[2:] == [("push", None), ("critic", ()), ("actor", ())]


def test_engines_take_no_memory_if_the_trainer_cannot_give_up_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No update is open yet, so there is nothing to abort; an abort would restore the engines' memory."""
    manager_calls: list[str] = []
    monkeypatch.setattr(sync.ManagerGroup, "call", lambda _, __, method, *___: manager_calls.append(method.__name__))
    residency, _ = sides()
    nothing: Any = None
    push = EngineSync(nothing, sync.ManagerGroup(()), {}, nothing, WeightsConfig(), 0.0, 1, 1, residency).push
    assert isinstance(residency.actor, Side)
    residency.actor.fails = True
    with pytest.raises(MemoryError):
        push(1)
    assert manager_calls == []
