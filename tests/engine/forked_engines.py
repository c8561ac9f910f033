"""Engines forked from one process that has imported SGLang: the import takes nine tenths of the CPU time of a start.

Python's fork server imports this module, which imports SGLang if ``IMPORTS`` is in the environment. Everything else is
slime_like's: ``EngineServer``, the engine's environment, ``main.py`` and the processes that it starts. The engines of a
run of train.py are forked too if the run has the environment ``forking_engines()``.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import forkserver, reduction, resource_tracker, spawn
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

import setproctitle

from slime_like.rollout.engine.environment import SPIN_COUNT
from slime_like.rollout.engine.server import EngineServer
from tests.namespaces import enter_namespaces, open_namespaces

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "SLIME_LIKE_TEST_FORK_SERVER"
ADDRESS = "SLIME_LIKE_TEST_FORK_SERVER_ADDRESS"
IMPORTS = {  # read when torch and SGLang are imported
    MARK: "1",
    "CUDA_VISIBLE_DEVICES": "",
    "GOMP_SPINCOUNT": SPIN_COUNT,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))),
    "SGLANG_PLATFORM": "slime_like_cpu",
    "SLIME_LIKE_SGLANG": "cpu",
    "TORCHDYNAMO_DISABLE": "1",
    "SLIME_LIKE_TEST_PADDING": "x" * 65_536,  # space for the environment of an engine
}
HEALTH_CHECK_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner"  # its import installs the platform's part of the plugins
MODULES = (  # a server or a rank imports the modules after the third only later; none of them imports MODEL_RUNNER
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sglang.srt.entrypoints.http_server",
    "slime_like.weight_sync.device_memory",
    "slime_like_plugins.qwen_gdn.torch_chunk",
    "sglang.kernels.ops.attention.fla.chunk",
    "sglang.kernels.ops.attention.fla.kda",
    "sglang.kernels.ops.attention.fla.layernorm_gated",
    "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm",
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "sglang.kernels.ops.attention.linear.lightning_attn",
    "sglang.kernels.ops.attention.linear.seg_la",
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.lora.dense.kv_b_lora_absorbed",
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.debug_utils.dumper",
    "sglang.srt.entrypoints.openai.serving_responses",
    "sglang.srt.kv_canary.api",
    "sglang.srt.layers.attention.dsa.dsa_backend_kpool",
    "sglang.srt.layers.attention.dsa.dsa_metadata_manager",
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    "sglang.srt.layers.attention.mamba.mamba",
    "sglang.srt.layers.attention.trtllm_mla_backend",
    "sglang.srt.mem_cache.kv_cache_configurator",
    "sglang.srt.rust_extensions.loader",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "sglang.srt.model_executor.pool_configurator",
    "sglang.srt.speculative.eagle_info",
)
_environments: list[Any] = []  # arrays of pointers that libc uses


def import_sglang() -> None:
    """Import the modules of ``slime_like.rollout.engine.main.serve`` and of ranks, without plugins, which depend on the engine."""
    from slime_like.rollout.engine.sglang_imports import sglang_imports

    with sglang_imports():
        for name in MODULES:
            importlib.import_module(name)
    assert MODEL_RUNNER not in sys.modules, "the platform's plugins depend on the engine"
    setproctitle.getproctitle()  # finds the memory of the title, which it cannot after a change of the environment
    assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread can be forked"


if os.environ.get(MARK):
    import_sglang()


class EngineMain:
    """Callable for a child of the fork server: run a function ("module:function") as the process of an engine.

    ``files`` are the engine's stdin, its log and a pipe that receives its process id, and the namespaces of the caller.
    """

    def __init__(self, target: str, files: Sequence[int], environment: dict[str, str]) -> None:
        self._target, self._files, self._environment = target, files, environment

    def __getstate__(self) -> tuple[str, Any, dict[str, str]]:
        return self._target, [reduction.DupFd(file) for file in self._files], self._environment

    def __setstate__(self, state: tuple[str, Any, dict[str, str]]) -> None:
        self._target, files, self._environment = state
        self._files = [file.detach() for file in files]

    def __call__(self) -> None:
        stdin, log, pid, *namespaces = self._files
        enter_namespaces(namespaces)
        os.write(pid, str(os.getpid()).encode())
        os.close(pid)
        os.setsid()
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(self._environment)
        show_environment()
        tempfile.tempdir = None
        if HEALTH_CHECK_TIMEOUT in os.environ:  # SGLang reads it at its import
            server = sys.modules["sglang.srt.entrypoints.http_server"]
            vars(server)["HEALTH_CHECK_TIMEOUT"] = int(os.environ[HEALTH_CHECK_TIMEOUT])
        vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)  # an engine has its own
        pkgutil.resolve_name(self._target)()


class ForkedEngine:
    """The part of ``subprocess.Popen`` that ``EngineServer`` uses."""

    def __init__(
        self, log: BinaryIO, environment: dict[str, str], target: str = "slime_like.rollout.engine.main:main"
    ) -> None:
        if ADDRESS not in os.environ:
            start_fork_server()
        (stdin, writer), (pid, pid_writer) = os.pipe(), os.pipe()
        files = [stdin, log.fileno(), pid_writer, *open_namespaces()]
        target_in_child = EngineMain(target, files, environment)
        self._process = multiprocessing.get_context("forkserver").Process(target=target_in_child)
        self._process.start()
        for file in (stdin, *files[2:]):
            os.close(file)
        self.stdin = os.fdopen(writer, "wb")
        self.pid = int(os.read(pid, 16))
        os.close(pid)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0.0)
        return self._process.exitcode


class ForkedEngineServer(EngineServer):
    """``EngineServer`` whose processes are forked."""

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", ForkedEngine(log, environment))


def show_environment() -> None:
    """Copy the environment of this forked process into the memory that ``/proc/<pid>/environ`` shows.

    A program that was started by exec has its environment there. slime_like and the tests find a run's processes and
    folders in this memory, and Ray searches the memory before it for the process title.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end of proc_pid_stat(5)
    variables = [os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items()]
    block = b"".join(variables)
    assert len(block) <= end - start, "the padding of the fork server is smaller than the environment of an engine"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block, len(block))
    addresses = itertools.accumulate(map(len, variables), initial=start)
    pointers = (ctypes.c_void_p * (len(variables) + 1))(*list(addresses)[:-1], None)
    _environments.append(pointers)
    ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ").value = ctypes.addressof(pointers)


def forking_engines() -> dict[str, str]:
    """Return variables for train.py with which its engines are forks of this process's fork server."""
    start_fork_server()
    address: Any = vars(forkserver._forkserver)["_forkserver_address"]
    folders = (str(REPOSITORY / "tests" / "e2e" / "forked"), os.environ.get("PYTHONPATH", ""))
    return {ADDRESS: address, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def fork_engines_of(module: ModuleType) -> None:
    """Make ``EngineServer`` of ``module`` fork engines from the fork server of another process, at ``ADDRESS``."""
    server: Any = forkserver._forkserver
    server.ensure_running = resource_tracker.ensure_running
    server._forkserver_address = os.environ[ADDRESS]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    preparation = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {key: value for key, value in preparation(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = get_preparation_data
    vars(module)["EngineServer"]._spawn = ForkedEngineServer._spawn


def start_fork_server() -> None:
    """Start this process's fork server, whose imports take as long as the start of an engine. Idempotent."""
    import pytest  # not in the actors of a run

    with pytest.MonkeyPatch.context() as patch:
        for name, value in IMPORTS.items():
            patch.setenv(name, value)
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        forkserver.ensure_running()
