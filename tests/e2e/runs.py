"""Running train.py for real, watching what it writes, and interrupting it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from slime_like.cluster.run.status import read_status
from slime_like.util.deadline import Deadline
from tests.e2e.leftovers import MARK, Held, leftovers
from tests.e2e.told import PLANTED

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_S = 420.0
POLL_S = 0.1
LOOK_S = 1.0  # between two looks at what a run holds
MEMORY_LOOK_S = 5.0  # between two looks at its shared memory
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended."""

    code: int
    output: str


class Training:
    """One train.py process, or another script that is one (by its path from the repository), in a session of its own."""

    started: ClassVar[list[Training]] = []  # by this process

    def __init__(
        self,
        *arguments: str,
        log: Path,
        script: str = "train.py",
        environment: Mapping[str, str] | None = None,
        folder: Path = REPOSITORY,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        folders = [argument.partition("=")[2] for argument in arguments if argument.startswith("run.dir=")]
        self._run_dir = Path(folders[-1]) if folders else None
        self.held = Held(f"{os.getpid()}.{next(_numbers)}")
        self._looked = self._looked_at_memory = 0.0
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(REPOSITORY / script), *arguments, "metrics.console=plain"],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **PLANTED, **(environment or {}), "HF_HUB_OFFLINE": "1", MARK: self.held.mark},
                start_new_session=True,
            )
        self.started.append(self)

    @property
    def pid(self) -> int:
        """Process id of train.py, which is the run's supervisor."""
        return self._process.pid

    def wait(self) -> Finished:
        """Wait for the end of the run; kills it when it takes too long."""
        self._wait(lambda: not self.running())
        return Finished(self._process.wait(), self._log.read_text())

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for something the run does; fails when the run ends first, kills it when it takes too long."""

        def reached_or_over() -> bool:
            assert self.running() or reached(), f"train.py ended early: {self._log.read_text()[-3000:]}"
            return reached()

        self._wait(reached_or_over)

    def look(self, memory: bool = True) -> None:
        """Note its processes, their sockets and their shared memory, now."""
        self.held.look(memory)
        self._looked = time.monotonic()
        if memory:
            self._looked_at_memory = self._looked

    def leftovers(self) -> list[str]:
        """What it left behind, once it has ended; it is killed where it has not."""
        if self.running():
            self._end()
            return [f"train.py itself, which said: {self._log.read_text()[-3000:]}"]
        told = [] if self._run_dir is None else self.held.secrets.in_files(self._run_dir)
        return [*leftovers(self.held), *told]

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = Deadline("test", "train.py", RUN_S)
        while not reached():
            if deadline.elapsed() > deadline.limit:
                self._end()
                raise deadline.exceeded(f"train.py, which said: {self._log.read_text()[-3000:]}")
            if time.monotonic() - self._looked > LOOK_S:
                self.look(memory=time.monotonic() - self._looked_at_memory > MEMORY_LOOK_S)
            time.sleep(POLL_S)

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> bool:
        """Return True while train.py lives."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to train.py alone."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Kill what hangs; its exit code."""
        self._end()
        return self._process.returncode

    def interrupt(self) -> None:
        """Ctrl-C on a terminal: every process of the group gets it."""
        os.killpg(self._process.pid, signal.SIGINT)


def train(*arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> Finished:
    """Run train.py to its end."""
    return Training(*arguments, log=log, environment=environment).wait()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Whole lines of metrics.jsonl so far."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def last_step(run_dir: Path) -> int:
    """Newest step logged, -1 before the first."""
    return max((int(row["step"]) for row in metrics(run_dir)), default=-1)


def outcomes(run_dir: Path) -> dict[str, str]:
    """Requests of ``run.dir/control`` so far, and the state of each."""
    status = read_status(run_dir)
    return {} if status is None else {answer.request: answer.state for answer in status.requests}
