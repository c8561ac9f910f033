"""Ranks on phantom GPUs that are forked from a process with the imports of a trainer, which take seconds.

``trainer_forks()`` is such a process, shared by the tests of a process. All end with the process that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import pickle
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from slime_like.phantom.device import PhantomGpu
from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports, without_model_classes
from slime_like.util.ports import PortLease
from tests.namespaces import PR_SET_PDEATHSIG
from tests.train import ranks

REPLY_S = 60


def fork() -> int:
    """Fork this process, which has one thread, without the handlers of ``pthread_atfork``.

    One of them makes torch refuse CUDA in a fork of a process that has counted GPUs. The state of a phantom GPU is in the memory of
    the process, so a fork has a GPU in the same state. Use ``os.fork`` once megatron-core does not call
    ``torch.cuda.is_available`` at its import (``core/dist_checkpointing/strategies/torch.py``), which counts them.
    """
    ranks.await_one_thread()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None)._Fork()
    (python.PyOS_AfterFork_Parent if pid else python.PyOS_AfterFork_Child)()
    return pid


@functools.cache
def trainer_forks() -> PhantomForks:
    """Return a process that has imported the trainer, and has not used its GPU."""
    return PhantomForks("tests.phantom.forks:import_trainer", PhantomGpu().environment())


class PhantomForks:
    """Owner of a process that forks ranks, one at a time. ``run`` starts it if it is not running. Leaving the context ends it."""

    def __init__(self, imports: str, variables: Mapping[str, str]) -> None:
        """``imports``: function ("module:function") that imports modules. ``variables``: those of a phantom GPU.

        A fork has the memory and limits of its own variables. It has the number of GPUs of ``variables``, which imports may count.
        """
        self._imports = imports
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, and with it a running rank. Idempotent."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits, and closes the pipes
                self._process = None

    def run(self, target: str, *args: Any, seconds: float = 240, environment: Mapping[str, str] | None = None) -> Any:
        """Run ``target`` ("module:function") as the only rank, in a fork. Otherwise like ``run_ranks``; return its result.

        ``environment``: variables of the fork in addition to those of this process, such as ``PhantomGpu.environment()``.
        """
        deadline = Deadline("test", target, seconds)
        child: ForkedRank | None = None
        with tempfile.TemporaryDirectory() as name, PortLease("127.0.0.1") as port:
            folder = Path(name)
            (folder / "args").write_bytes(pickle.dumps(args))
            own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
            variables = {**os.environ, **own, **(environment or {})}
            try:
                process = self._process or self._start(deadline)
                rank = [target, "0", "1", str(port), name, str(deadline.remaining("the imports"))]
                child = fork_rank(process, {"environment": variables, "rank": rank, "output": str(folder / "out0")})
                ranks.await_ranks([child], folder, deadline)
            finally:
                if child is None or child.code is None:  # the next run would read what the process still writes
                    if child is not None:
                        kill_group(child.pid)
                    self.close()
            return ranks.read_results(folder, 1)[0]

    def _start(self, deadline: Deadline) -> subprocess.Popen[bytes]:
        """Start the process and wait for its imports."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, self._imports],
            cwd=ranks.ROOT,
            env={**os.environ, **self._variables, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # ``select`` does not see what a buffer holds
            start_new_session=True,
        )
        read_number(self._process, deadline, "the imports")
        return self._process


@dataclass(slots=True)
class ForkedRank:
    """Rank that was forked by another process."""

    pid: int
    read_code: Callable[[], int]
    code: int | None = None

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit code."""
        if self.code is None:
            self.code = self.read_code()
        return self.code


def fork_rank(process: subprocess.Popen[bytes], request: Mapping[str, Any]) -> ForkedRank:
    """Let ``process`` fork a rank."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")

    def read(subject: str) -> int:
        return read_number(process, Deadline("test", "fork", REPLY_S), subject)

    return ForkedRank(read("a process id"), lambda: read("an exit code"))


def read_number(process: subprocess.Popen[bytes], deadline: Deadline, subject: str) -> int:
    """Return the next number that ``process`` writes. Raises AssertionError if it has ended, and DeadlineExceeded."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], deadline.remaining(subject))[0]:
        pass
    line = process.stdout.readline()
    assert line, f"the process that forks ranks has ended with {process.wait()}"
    return int(line)


def kill_group(pid: int) -> None:
    """Kill a rank and what it has started. A rank that has not called ``setsid`` ends with the process that forked it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Write 0, and per request the process id of a fork and its exit code.

    At the end of the requests, which is the end of the test process, kill the rank and return.
    """
    write_number(replies, 0)
    line = requests.readline()
    while line:
        request = json.loads(line)
        parent, pid = os.getpid(), fork()
        if pid == 0:
            requests.close()
            replies.close()
            run_rank(parent, request)
        write_number(replies, pid)
        handle = os.pidfd_open(pid)
        ready, _, _ = select.select([handle, requests], [], [])
        os.close(handle)
        if handle not in ready:
            kill_group(pid)
            return
        write_number(replies, exit_code(pid))
        line = requests.readline()
        os.waitpid(pid, 0)  # not before: the test process uses the process id until it has read the exit code


def exit_code(pid: int) -> int:
    """Wait for the end of a fork, which stays a zombie, and return its exit code."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def write_number(replies: IO[bytes], number: int) -> None:
    """Write a line with a number."""
    replies.write(b"%d\n" % number)


def run_rank(parent: int, request: Mapping[str, Any]) -> NoReturn:
    """Run a rank in this fork, as ``python -m tests.train.ranks`` does in a new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    output, nothing = os.open(request["output"], os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    ranks.rank_main(*request["rank"])


def import_trainer() -> None:
    """Import the trainer as ``solo.join`` does, and what its first step imports; compute the hashes of compilers that it needs."""
    from slime_like.train.megatron.trace import solo

    solo.import_trainer()
    with without_model_classes():
        importlib.import_module("transformers").AutoConfig.for_model("qwen3")
    for name in ("triton.runtime.cache:triton_key", "torch._inductor.codecache:torch_key"):
        pkgutil.resolve_name(name)()  # cached
    for name in ("trace_checks", "trainer_checks"):
        importlib.import_module(f"tests.phantom.{name}")


if __name__ == "__main__":
    with heavy_imports():
        pkgutil.resolve_name(sys.argv[1])()
    with (
        os.fdopen(os.dup(0), "rb", buffering=0) as requests,
        os.fdopen(os.dup(1), "wb", buffering=0) as replies,
        contextlib.suppress(BrokenPipeError),  # the test process has ended
    ):
        serve(requests, replies)
