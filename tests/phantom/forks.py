"""Ranks on phantom GPUs that are forked from a process with the imports of a trainer or of SGLang, which take seconds.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from slime_like.phantom.device import PhantomGpu
from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports, without_model_classes
from slime_like.util.ports import PortLease
from tests.namespaces import PR_SET_PDEATHSIG
from tests.train import ranks

ENGINE_MODULES = ("sglang.srt.plugins", "sglang.srt.server_args", "sglang.srt.entrypoints.http_server")


def fork() -> int:
    """Fork this process, which has one thread, without the handlers of ``pthread_atfork``.

    One of them makes torch refuse CUDA in a fork of a process that has counted GPUs, as SGLang does at its import. The state of a
    phantom GPU is in the memory of the process, so a fork has a GPU in the same state.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread can be forked"
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
    """Process that forks ranks, one at a time. Leaving the context ends it."""

    def __init__(self, imports: str, variables: Mapping[str, str]) -> None:
        """``imports``: function ("module:function") that imports modules. ``variables``: those of a phantom GPU, and PYTHONPATH.

        A fork has the memory and limits of its own variables. After ``import_engine`` it has the GPUs of ``variables``, because SGLang
        counts them at its import.
        """
        counting = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # not by CUDA, which keeps the number
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, imports],
            cwd=ranks.ROOT,
            env={**os.environ, **variables, **counting, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def run(self, target: str, *args: Any, seconds: float = 240, environment: Mapping[str, str] | None = None) -> Any:
        """Run ``target`` ("module:function") as the only rank, in a fork. Otherwise like ``run_ranks``; return its result.

        ``environment``: variables of the fork in addition to those of this process, such as ``PhantomGpu.environment()``.
        """
        deadline = Deadline("test", target, seconds)
        with tempfile.TemporaryDirectory() as name, PortLease("127.0.0.1") as port:
            folder = Path(name)
            (folder / "args").write_bytes(pickle.dumps(args))
            own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
            variables = {**os.environ, **own, **(environment or {})}
            rank = [target, "0", "1", str(port), name, str(deadline.limit)]
            self._write({"environment": variables, "rank": rank, "output": str(folder / "out0")})
            child = ForkedRank(self._read(deadline, "the imports"), self._read)
            try:
                ranks._await([child], folder, deadline)
            finally:
                if child.code is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
            return ranks._results(folder, 1)[0]

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self, deadline: Deadline | None = None, subject: str = "") -> int:
        """Return the next number that the process writes: the process id of a fork, then its exit code."""
        output = self._process.stdout
        assert output is not None
        if deadline is not None:
            while not select.select([output], [], [], 1.0)[0]:
                deadline.remaining(subject)
        line = output.readline()
        assert line, f"the process that forks ranks has ended with {self._process.wait()}"
        return int(line)


@dataclass(slots=True)
class ForkedRank:
    """Rank that was forked by another process."""

    pid: int
    read_code: Any
    code: int | None = None

    def wait(self) -> int:
        """Wait for the end of the rank and return its exit code."""
        if self.code is None:
            self.code = int(self.read_code())
        return self.code


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Fork a rank per request. At the end of the requests, which is the end of the test process, kill the rank and return."""
    while line := requests.readline():
        request = json.loads(line)
        parent, pid = os.getpid(), fork()
        if pid == 0:
            requests.close()
            replies.close()
            run_rank(parent, request)
        reply(replies, pid)
        handle = os.pidfd_open(pid)
        ready, _, _ = select.select([handle, requests], [], [])
        if handle not in ready:
            os.killpg(pid, signal.SIGKILL)
        os.close(handle)
        with contextlib.suppress(BrokenPipeError):
            reply(replies, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def reply(replies: IO[bytes], number: int) -> None:
    """Write a line with a number."""
    replies.write(b"%d\n" % number)
    replies.flush()


def run_rank(parent: int, request: Mapping[str, Any]) -> NoReturn:
    """Run a rank in this fork, as ``python -m tests.train.ranks`` does in a new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    output, nothing = os.open(request["output"], os.O_WRONLY | os.O_CREAT), os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    ranks._child(*request["rank"])
    raise AssertionError("a rank does not return")


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


def import_engine() -> None:
    """Import SGLang without plugins, which depend on the engine, and the module of the rank that starts an engine."""
    from slime_like.rollout.engine.sglang_imports import sglang_imports

    with sglang_imports():
        for name in ENGINE_MODULES:
            importlib.import_module(name)
    for name in ("arguments", "process"):
        importlib.import_module(f"tests.phantom.engine_{name}")


if __name__ == "__main__":
    with heavy_imports():
        pkgutil.resolve_name(sys.argv[1])()
    with os.fdopen(os.dup(0), "rb", buffering=0) as requests, os.fdopen(os.dup(1), "wb") as replies:
        serve(requests, replies)
