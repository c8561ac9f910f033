"""Progress messages during start."""

from __future__ import annotations

from slime_like.cluster.start.progress import QUIET_S, Progress


def test_progress_reports_ready_parts_and_long_waits_only() -> None:
    now, messages = [0.0], list[str]()
    progress = Progress(messages.append, clock=lambda: now[0])
    now[0] = 3.0
    progress.ready("Ray is up", "trainer and engines")
    progress.waiting("engine 0")
    now[0] += QUIET_S
    progress.waiting("engine 0")
    progress.waiting("engine 0")
    now[0] += 1
    progress.ready("ready")
    assert messages == [
        "Ray is up after 3 s; waiting for trainer and engines",
        "still waiting for engine 0 after 13 s",
        "ready after 14 s",
    ]
