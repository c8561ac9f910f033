"""Watch Ray's processes for the supervisor: the run ends if one dies or is suspended (SIGSTOP) for too long."""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import dataclass

import psutil

from slime_like.cluster.supervise import process_tree

PAUSED_S = 5.0  # a longer gap between checks means that this process was suspended, perhaps with all others
STOPPED_S = 10.0  # for which a Ray process may be suspended; less than the time after which Ray declares its node dead


@dataclass(slots=True)
class _RayProcess:
    name: str
    process: psutil.Process
    stopped_since: float | None = None


class RayWatch:
    """Watcher of Ray processes.

    It registers a pidfd of each process in ``selector``. The user of ``selector`` has to call the ``data`` of each ready key.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.dead: list[str] = []  # a message per process
        self._selector = selector
        self._alive: dict[str, _RayProcess] = {}
        self._last_check = time.monotonic()

    def add(self, name: str, pid: int) -> None:
        """Watch a process by pidfd, which is safe against reuse of the process id.

        A process that has ended before this call is recorded as dead.
        """
        label = f"Ray's {name} (process {pid})"
        try:
            process = psutil.Process(pid)
            fd = os.pidfd_open(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            self.dead.append(f"{label} died")
            return
        self._alive[name] = _RayProcess(label, process)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._died(name, fd))

    def problems(self) -> list[str]:
        """Return a message for each process that died or, if none died, for each that has been suspended for too long.

        Also start to watch agents that the raylet has started since the last call.
        """
        self._look_for_agents()
        return self.dead or self._stopped_processes()

    def _died(self, name: str, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        self.dead.append(f"{self._alive.pop(name).name} died")

    def _look_for_agents(self) -> None:
        raylet = self._alive.get("raylet")
        if raylet is not None and not self._alive.keys() >= process_tree.RAY_AGENTS.keys():
            for name, pid in process_tree.ray_agents(raylet.process).items():
                if name not in self._alive and psutil.pid_exists(pid):
                    self.add(name, pid)

    def _stopped_processes(self) -> list[str]:
        now = time.monotonic()
        was_stopped, self._last_check = now - self._last_check > PAUSED_S, now
        stopped_processes: list[str] = []
        for ray in self._alive.values():
            if was_stopped or not process_tree.is_stopped(ray.process):
                ray.stopped_since = None
            elif ray.stopped_since is None:
                ray.stopped_since = now
            elif now - ray.stopped_since > STOPPED_S:
                stopped_processes.append(f"{ray.name} has been stopped for {now - ray.stopped_since:.0f} s (SIGSTOP?)")
        return stopped_processes
