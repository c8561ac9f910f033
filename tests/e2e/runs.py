"""Start train.py in a process, wait for conditions on its files, and signal it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import psutil

from slime_like.cluster.run.status import read_status
from slime_like.cluster.supervise.process_tree import command
from slime_like.cluster.supervise.stacks import gather_stacks, live_processes
from slime_like.util import c_build
from slime_like.util.caches import FALLBACK
from slime_like.util.deadline import Deadline
from slime_like.util.private import temporary_folder
from tests.e2e.exposed_secrets import PLANTED_SECRETS
from tests.e2e.forked.fork_client import FORK_DRIVER
from tests.e2e.forked_training import ForkedTraining
from tests.e2e.leftovers import MARK, RunResources, leftovers, living_processes

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_S = 420.0
POLL_S = 0.1
RECORD_S = 1.0  # between two records of a run's sockets and secrets
MEMORY_RECORD_S = 5.0  # between two records of its shared memory
STACKS_S = 10.0  # for the processes of a hanging run to write their stacks
_run_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class RunResult:
    """Exit code and output of a run."""

    code: int
    output: str


class Training:
    """A process of train.py, or of another script that starts a run, in a new session. ``script`` is relative to the repository."""

    instances: ClassVar[list[Training]] = []  # all runs that this process has started

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
        run_dirs = [argument.partition("=")[2] for argument in arguments if argument.startswith("run.dir=")]
        self._run_dir = Path(run_dirs[-1]) if run_dirs else None
        self.resources = RunResources(f"{os.getpid()}.{next(_run_numbers)}", living_processes())
        self._recorded_at = self._memory_recorded_at = 0.0
        command = [str(REPOSITORY / script), *arguments, "metrics.console=plain"]
        variables = {**os.environ, **PLANTED_SECRETS, **(environment or {}), "HF_HUB_OFFLINE": "1"}
        variables[MARK] = self.resources.mark
        is_forked = variables.pop(FORK_DRIVER, None) is not None and script == "train.py"
        with log.open("wb") as file:
            self._process = (ForkedTraining if is_forked else _start_python)(command, folder, variables, file)
        self.instances.append(self)

    @property
    def pid(self) -> int:
        """Return the process id of train.py, which is the run's supervisor."""
        return self._process.pid

    def wait(self) -> RunResult:
        """Wait for the end of the run; kill the run after ``RUN_S`` seconds."""
        self._wait(lambda: not self.running())
        return RunResult(self._process.wait(), self._log.read_text())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true. Fail if the run ends first; kill the run after ``RUN_S`` seconds."""

        def met_or_ended() -> bool:
            assert self.running() or condition(), f"train.py ended early: {self._log.read_text()[-3000:]}"
            return condition()

        self._wait(met_or_ended)

    def record(self, memory: bool = True) -> None:
        """Record the run's processes, their sockets and, if ``memory``, their shared memory."""
        self.resources.record(memory)
        self._recorded_at = time.monotonic()
        if memory:
            self._memory_recorded_at = self._recorded_at

    def leftovers(self) -> list[str]:
        """Return a line for each resource that the run left behind. Kill the run if it has not ended."""
        if self.running():
            self._kill()
            return [f"train.py itself, whose output ends with: {self._log.read_text()[-3000:]}"]
        exposures = [] if self._run_dir is None else self.resources.secrets.in_files(self._run_dir)
        return [*leftovers(self.resources), *exposures]

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline("test", "train.py", RUN_S)
        while not condition():
            if deadline.elapsed() > deadline.limit:
                try:
                    processes = describe_processes(self.resources.processes(), self._run_dir)
                finally:
                    self._kill()
                raise deadline.exceeded(
                    f"train.py, whose output ends with: {self._log.read_text()[-3000:]}\n{processes}"
                )
            if time.monotonic() - self._recorded_at > RECORD_S:
                self.record(memory=time.monotonic() - self._memory_recorded_at > MEMORY_RECORD_S)
            time.sleep(POLL_S)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # the server of forked drivers has reaped it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> bool:
        """Return True while train.py lives."""
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to train.py alone."""
        self._process.send_signal(number)

    def kill(self) -> int:
        """Kill a run that hangs and return its exit code."""
        self._kill()
        return self._process.wait()

    def interrupt(self) -> None:
        """Send SIGINT to every process of the group, as Ctrl-C on a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)


def _start_python(
    command: list[str], folder: Path, environment: dict[str, str], output: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a Python script in a new session."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


def unwritable_home() -> dict[str, str]:
    """Return the environment of a run whose home folder cannot be written.

    Compiled kernels are copied to the cache that such a run uses: compiling them again would take 24 s of CPU time.
    """
    folder = temporary_folder("cpu_kernels", FALLBACK)
    for kernels in c_build.cache_folder().glob("*.so"):
        if not (folder / kernels.name).exists():
            scratch = folder / f"{kernels.name}.{os.getpid()}"
            shutil.copy2(kernels, scratch)
            scratch.rename(folder / kernels.name)
    return {"HOME": "/proc"}


def train(*arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> RunResult:
    """Run train.py to its end."""
    return Training(*arguments, log=log, environment=environment).wait()


def describe_processes(pids: list[int], run_dir: Path | None) -> str:
    """Return the state of each process, one per line, and the stacks that the processes of ``run_dir`` write on request."""
    lines: list[str] = []
    for pid in pids:
        with suppress(psutil.Error):  # it has ended in the meantime
            process = psutil.Process(pid)
            lines.append(f"process {pid}: {process.status()}: {command(process)}")
    if run_dir is not None:
        folder = run_dir / "stacks"
        gather_stacks(folder, STACKS_S)
        for name, pid in live_processes(folder).items():
            lines += [f"{name}:\n{path.read_text()}" for path in folder.glob(f"{name}.{pid}.*.txt")]
    return "\n".join(lines)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl so far, without an incomplete last line."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def last_step(run_dir: Path) -> int:
    """Return the newest logged step, or -1 if no step is logged."""
    return max((int(row["step"]) for row in metrics(run_dir)), default=-1)


def outcomes(run_dir: Path) -> dict[str, str]:
    """Return the state of each request in ``run.dir/control`` so far."""
    status = read_status(run_dir)
    return {} if status is None else {answer.request: answer.state for answer in status.requests}
