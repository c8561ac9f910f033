"""Teardown of the rollout manager's actor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.workers import rollout_actor
from slime_like.data.share import SINGLE
from slime_like.rollout.manager import RolloutManager


class RecordingReaper:
    """Reaper that records whether it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        """Record the call."""
        self.closed = True


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> RecordingReaper:
    """Keep an actor from changing this process; return its reaper."""
    recording_reaper = RecordingReaper()
    for name in ("_redirect_output", "record_streams", "dump_stacks_on_signal"):
        monkeypatch.setattr(rollout_actor, name, lambda *_: None)
    monkeypatch.setattr(rollout_actor, "reaper", lambda: recording_reaper)
    return recording_reaper


def test_an_actor_that_was_not_connected_stops(tmp_path: Path, reaper: RecordingReaper) -> None:
    asyncio.run(rollout_actor.RolloutActor(str(tmp_path), {}, str(tmp_path / "log")).stop())
    assert reaper.closed


def test_processes_of_user_code_end_even_if_the_manager_fails_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaper: RecordingReaper
) -> None:
    async def fail(manager: RolloutManager) -> None:
        raise OSError("the reward pool is gone")

    monkeypatch.setattr(RolloutManager, "stop", fail)
    monkeypatch.setattr(RolloutManager, "__init__", lambda *_: None)
    spec: Any = SimpleNamespace(share=SINGLE, rollout=None, routing=None, health=SimpleNamespace(timeout_s=1.0))
    source: Any = None
    template: Any = SimpleNamespace(reserved=())
    actor = rollout_actor.RolloutActor(str(tmp_path), {}, str(tmp_path / "log"))

    async def run() -> None:
        await actor.connect(spec, source, {}, [], template)
        await actor.stop()

    with pytest.raises(OSError, match="reward pool is gone"):
        asyncio.run(run())
    assert reaper.closed
