"""Remote expert workers of this process's runs, and a thread that kills one of them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.e2e.runs import metrics

WORKER = "slime_like_plugins.remote_experts.worker"


def workers(ancestor: int | None = None) -> list[psutil.Process]:
    """Return the living workers that descend from a process, by default from this one."""
    running_workers: list[psutil.Process] = []
    for process in psutil.Process(ancestor).children(recursive=True):
        with suppress(psutil.Error):  # it has ended or is a zombie
            if any(WORKER in argument for argument in process.cmdline()):
                running_workers.append(process)
    return running_workers


def kill_once(run_dir: Path, pids: list[int], end_event: threading.Event) -> None:
    """Kill a worker once the run has trained on its first rollout."""
    while not end_event.is_set():
        trained = (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) > 1
        if trained and (running := workers()):
            running[0].kill()
            pids.append(running[0].pid)
            return
        end_event.wait(0.2)


@contextmanager
def worker_killed_once(run_dir: Path) -> Generator[list[int]]:
    """Kill a worker of the run once, after its first training step. Yield the list of killed process ids."""
    pids: list[int] = []
    end_event = threading.Event()
    killer = threading.Thread(target=kill_once, args=(run_dir, pids, end_event))
    killer.start()
    try:
        yield pids
    finally:
        end_event.set()
        killer.join()
