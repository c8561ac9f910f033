"""Runner of functions on N ranks, one process each.

``run_ranks("package.module:function", 2, folder)`` calls ``function(world, folder)`` in two new interpreters and
returns their results. Arguments and results are pickled into files of a private folder. If a rank fails, the others are
killed at once, because they may wait for it in a collective. At the deadline all are killed.

``fork_ranks`` runs the function in forks of the calling process, which need not repeat its imports.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn, Protocol

from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports
from slime_like.util.leave import leave
from slime_like.util.ports import PortLease

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class RankWorld:
    """A rank's number, the world size and the rendezvous."""

    rank: int
    size: int
    host: str
    port: int


def run_ranks(
    target: str, size: int, *args: Any, seconds: float = 240, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """Run ``target`` ("module:function") on ``size`` ranks. Return their results in rank order.

    ``environment``: further variables of the ranks. Raises AssertionError if a rank fails, and DeadlineExceeded after
    ``seconds``.
    """
    deadline = Deadline("test", target, seconds)
    with tempfile.TemporaryDirectory() as name, PortLease("127.0.0.1") as port:
        folder = Path(name)
        (folder / "args").write_bytes(pickle.dumps(args))
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **(environment or {}),
        }
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.train.ranks",
                    target,
                    str(rank),
                    str(size),
                    str(port),
                    name,
                    str(deadline.limit),
                ],
                cwd=ROOT,
                env=variables,
                stdout=(folder / f"out{rank}").open("wb"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(size)
        ]
        try:
            await_ranks(children, folder, deadline)
        finally:
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return read_results(folder, size)


class Child(Protocol):
    """A process of one rank."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        ...


@dataclass(slots=True)
class Fork:
    """A fork of this process."""

    pid: int
    code: int | None = None

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def fork_ranks(function: Callable[..., Any], size: int, *args: Any, seconds: float = 240) -> list[Any]:
    """Run ``function`` on ``size`` forks of this process, which must have one thread. Otherwise like ``run_ranks``."""
    deadline = Deadline("test", function.__name__, seconds)
    faulthandler.cancel_dump_traceback_later()  # ends its thread, which a fork would not have
    await_one_thread()
    with tempfile.TemporaryDirectory() as name, PortLease("127.0.0.1") as port:
        folder = Path(name)
        children: list[Fork] = []
        try:
            for rank in range(size):
                pid = os.fork()
                if pid == 0:
                    output = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                    _work(function, RankWorld(rank, size, "127.0.0.1", port), args, folder, deadline.limit)
                children.append(Fork(pid))
            await_ranks(children, folder, deadline)
        finally:
            for child in children:
                if child.code is None:
                    os.kill(child.pid, signal.SIGKILL)
                    child.wait()
        return read_results(folder, size)


def await_one_thread(seconds: float = 10) -> None:
    """Wait until joined threads have ended. Raises AssertionError if a thread keeps running."""
    deadline = Deadline("test", "fork", seconds)
    while threads := set(os.listdir("/proc/self/task")) - {str(os.getpid())}:
        assert deadline.elapsed() < deadline.limit, f"a lock that threads {threads} hold would stay locked in a fork"
        time.sleep(0.001)


class _ResultReader(pickle.Unpickler):
    """Reader of a rank's result that keeps megatron out of this process.

    An import here would skip the adaptations and replace torch's tensor loading for all later tests.
    """

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("megatron.core.safe_globals", "safe_load_from_bytes"):
            # megatron's import makes tensors refer to this function instead of torch's.
            from torch import storage

            return storage._load_from_bytes
        had_megatron = "megatron.core" in sys.modules
        value = super().find_class(module_name, global_name)
        if not had_megatron and "megatron.core" in sys.modules:
            raise AssertionError(f"a rank's result contains {module_name}.{global_name}, whose import imports megatron")
        return value


def read_results(folder: Path, size: int) -> list[Any]:
    """Return the results of all ranks in rank order."""
    return [_ResultReader(io.BytesIO((folder / f"result{rank}").read_bytes())).load() for rank in range(size)]


def await_ranks(children: Sequence[Child], folder: Path, deadline: Deadline) -> None:
    """Wait for the end of all ranks, whose output is in ``folder``.

    Raises AssertionError with the output of the first rank that fails, and DeadlineExceeded.
    """
    handles = {os.pidfd_open(child.pid): rank for rank, child in enumerate(children)}
    try:
        pending = set(handles)
        while pending:
            for handle in wait(list(pending), deadline.remaining(f"ranks {sorted(handles[h] for h in pending)}")):
                assert isinstance(handle, int)
                rank = handles[handle]
                code = children[rank].wait()
                if code:
                    output = (folder / f"out{rank}").read_text(errors="replace")
                    raise AssertionError(f"rank {rank} of {len(children)} ended with {code}:\n{output[-8000:]}")
                pending.remove(handle)
    finally:
        for handle in handles:
            os.close(handle)


def rank_main(target: str, rank: str, size: str, port: str, folder: str, limit: str) -> NoReturn:
    """Run ``target`` as a rank in this process, which ends with it. The arguments are those of ``python -m tests.train.ranks``."""
    module, _, function = target.partition(":")
    args = pickle.loads((Path(folder) / "args").read_bytes())  # noqa: S301 (our own file)
    world = RankWorld(int(rank), int(size), "127.0.0.1", int(port))

    def call(*args: Any) -> Any:
        with heavy_imports():
            imported = importlib.import_module(module)
        return getattr(imported, function)(*args)

    _work(call, world, args, Path(folder), float(limit))


def _work(function: Callable[..., Any], world: RankWorld, args: Sequence[Any], folder: Path, limit: float) -> NoReturn:
    # Dump stacks shortly before the parent's deadline, so that its message has them. With a limit of a few seconds, the
    # parent kills this process before the dump.
    faulthandler.dump_traceback_later(limit - 5 if limit > 10 else limit + 60, exit=True)
    try:
        result = function(world, *args)
    except BaseException:  # noqa: BLE001 (fault boundary: the parent prints the error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: destructors of a broken process group may wait for peers
    scratch = folder / f"result{world.rank}.tmp"
    scratch.write_bytes(pickle.dumps(result))
    scratch.rename(folder / f"result{world.rank}")
    leave(0)


if __name__ == "__main__":
    from tests.train import ranks  # so that RankWorld is the class of tests.train.ranks, not of __main__

    ranks.rank_main(*sys.argv[1:])
