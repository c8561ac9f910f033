"""Server that forks drivers and Ray's workers of a test's runs from a process that has imported torch, megatron-core and transformers.

The imports take a third of the CPU time of a rank in a short run. Everything else is as in a user's run. The server
imports packages that Ray imports, but not Ray, which reads a worker's variables (``RAY_JOB_ID``) at its import. If the
environment of a run has the variables of ``forking_workers()``, the raylet starts Python for a worker as usual;
tests/e2e/forked/sitecustomize.py then sends command, environment and files to the server, and waits for the end of the
fork. ``ForkedTraining`` requests the fork of a train.py without such a process. The fork is in the namespaces of the process
that requested it (a node of tests/nodes). A fork ends when the process that requested it or the server ends; the server ends with
the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NoReturn

from slime_like.util.deadline import Deadline, scale
from slime_like.util.leave import leave
from tests.e2e.forked.fork_client import ADDRESS, FORK_DRIVER, LOG, NUM_BYTES, SCRIPT, START_S
from tests.engine import forked_engines
from tests.namespaces import PR_SET_PDEATHSIG, enter_namespaces, open_namespaces

REPOSITORY = Path(__file__).resolve().parents[2]
CLIENT = REPOSITORY / "tests" / "e2e" / "forked"
TITLE_BYTES = 4_096  # space for the title of a worker
MAX_REQUEST_BYTES = 2**20
NUM_THREADS = "1"  # of torch in the server, and of a rank unless the run's plan has another number
REQUEST_S = 10.0  # for a client to send its request
CREDENTIALS = struct.Struct("3i")  # process, user and group of a peer; unix(7)
IMPORTS = (
    # Imported by Ray.
    *("google.protobuf.json_format", "jsonschema", "msgpack", "requests", "tqdm.auto", "uvloop", "wcwidth"),
    "slime_like.cluster.plan.ray_cluster",
    "slime_like.cluster.supervise.crash",
    "slime_like.cluster.workers.peaks",
    "slime_like.quickstart.tool",
    "slime_like.rollout.manager",
    "slime_like.train.megatron.rank.critic",
    "slime_like.train.megatron.rank.teacher",
    "slime_like.train.megatron.rank.trainer",
)
DRIVER_IMPORTS = (
    *("hydra", "logging.config", "logging.handlers", "pdb", "socketserver", "starlette.datastructures"),
    "slime_like.cli",
    "slime_like.cluster.plan.verify",
    "slime_like.cluster.run.control",
    "slime_like.cluster.run.status",
    "slime_like.cluster.start.identity",
    "slime_like.cluster.start.prepared",
    "slime_like.cluster.supervise.reporting",
    "slime_like.cluster.supervise.supervisor",
    "slime_like.config.load.explain",
    "slime_like.config.schema.render",
    "slime_like.data.assemble",
    "slime_like.data.demonstrations",
    "slime_like.data.prompts",
    "slime_like.data.token_table",
    "slime_like.metrics.sinks",
    "slime_like.metrics.user_sink",
    "slime_like.quickstart.prepare",
    "slime_like.report.write",
    "slime_like_compat.flags.translate",
)
# Prefixes of variables that the imports read: they have to be equal in server and worker.
READ_AT_IMPORT = (
    *("CUDA_", "GOMP_", "HF_", "HOME", "KMP_", "LD_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PYTORCH_"),
    *("SGLANG_", "TORCH", "TRANSFORMERS_", "TRITON_", "XDG_"),
)
READ_LATER = {"HF_TOKEN", "TORCHINDUCTOR_CACHE_DIR"}
# Set by actors before they import torch.
SET_BY_ACTORS = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    """Command of a worker, with its working folder, environment and standard files."""

    arguments: list[str]  # after the interpreter
    folder: str
    environment: dict[str, str]
    files: list[int] = field(compare=False)


def forking_workers(*, driver: bool = True) -> dict[str, str]:
    """Return the variables that make engines, Ray workers and, if ``driver``, train.py itself forks of this process's servers."""
    variables = forked_engines.forking_engines() | {ADDRESS: str(start_worker_server()), "OMP_NUM_THREADS": NUM_THREADS}
    return variables | ({FORK_DRIVER: "1"} if driver else {})


@cache
def start_worker_server() -> Path:
    """Start this process's server; return the path of its socket."""
    folder = Path(tempfile.mkdtemp(prefix="slime_like_test_"))
    address, log = folder / "socket", folder / LOG
    environment = os.environ | SET_BY_ACTORS | {"HF_HUB_OFFLINE": "1"}
    environment |= {
        "OMP_NUM_THREADS": NUM_THREADS,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
    }
    environment["SLIME_LIKE_TEST_PADDING"] = "x" * 65_536  # space for the environment of a worker
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(address), "x" * TITLE_BYTES],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    atexit.register(_stop, process, folder)
    deadline = Deadline("test", "start of the server that forks workers", START_S)
    while not address.exists():
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            deadline.remaining(f"{log}: {log.read_text(errors='replace')[-3000:]}")
        else:
            raise AssertionError(f"the server that forks workers ended: {log.read_text(errors='replace')[-3000:]}")
    return address


def _stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(START_S)
    process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def import_worker() -> None:
    """Import the modules that a trainer rank, the actors of a run and its driver import, except Ray and those that import it."""
    from slime_like.util.imports import heavy_imports

    with heavy_imports():
        from slime_like.train.megatron.platform import host

        host.install("cpu")
        for name in (*IMPORTS, *DRIVER_IMPORTS):
            importlib.import_module(name)
        import_configs()
    assert "ray" not in sys.modules, "Ray has read its variables"
    assert len(os.listdir("/proc/self/task")) == 1, "only a process with one thread can be forked"
    gc.collect()
    gc.freeze()


def import_configs() -> None:
    """Import transformers' config classes as a rank does, which takes 0.8 s of CPU time in each rank."""
    from slime_like.util.imports import without_model_classes

    with without_model_classes():
        from transformers import AutoConfig

        AutoConfig.for_model("qwen3")


@dataclass(slots=True)
class WorkerServer:
    """Server that forks workers. It keeps a connection to the process that requested each fork."""

    listener: socket.socket
    selector: selectors.DefaultSelector = field(default_factory=selectors.DefaultSelector)
    forks: dict[int, socket.socket] = field(default_factory=dict[int, socket.socket])  # by process id

    def serve(self) -> WorkerRequest | None:
        """Serve until end-of-file on stdin, then return None; in a fork, return the request at once."""
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(0, selectors.EVENT_READ, lambda: None)
        while True:
            for key, _ in self.selector.select():
                if key.fd == 0:
                    self.kill(*self.forks)
                    return None
                if request := key.data():
                    return request

    def accept(self) -> WorkerRequest | None:
        """Fork a process for the next connection. Return the request in the fork, None in the server."""
        connection, _ = self.listener.accept()
        files: list[int] = []
        try:
            connection.settimeout(REQUEST_S * scale())
            request = receive(connection, files)
            if different := different_variables(request.environment):
                raise ValueError(f"the server has imported torch with other values of {different}")
            namespaces = open_namespaces(peer(connection))
            (ready, ready_writer), server_pid = os.pipe(), os.getpid()
            files += ready, ready_writer
            if (pid := os.fork()) == 0:
                end_with_parent(server_pid)
                os.setsid()
                os.close(ready)
                os.close(ready_writer)
                self.selector.close()
                for opened in (self.listener, connection, *self.forks.values()):
                    opened.close()
                files.clear()
                enter_namespaces(namespaces)
                return request
            files += namespaces
            os.close(ready_writer)
            files.remove(ready_writer)
            os.read(ready, 1)  # ends when the fork has its session, whose processes the client may signal
        except (OSError, ValueError, TypeError) as error:
            send(connection, {"error": str(error)})
            connection.close()
            return None
        finally:
            for file in files:
                os.close(file)
        self.forks[pid] = connection
        handle = os.pidfd_open(pid)
        self.selector.register(handle, selectors.EVENT_READ, lambda: self.reap(pid, handle))
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.disconnected(pid))
        send(connection, {"pid": pid})
        return None

    def disconnected(self, pid: int) -> None:
        """Kill a fork whose client has ended, unless the fork has ended too."""
        if pid in self.forks:
            self.selector.unregister(self.forks[pid])
            self.kill(pid)

    def kill(self, *pids: int) -> None:
        """Kill forks."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def reap(self, pid: int, handle: int) -> None:
        """Send the exit code of a fork to its client."""
        self.selector.unregister(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with self.forks.pop(pid) as connection:
            with contextlib.suppress(KeyError):  # its client has ended
                self.selector.unregister(connection)
            send(connection, code)


def peer(connection: socket.socket) -> int:
    """Return the process id of a client, as this process sees it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(credentials)[0]


def send(connection: socket.socket, reply: object) -> None:
    """Send a line of JSON to a client, which may have ended."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(reply).encode() + b"\n")


def receive(connection: socket.socket, files: list[int]) -> WorkerRequest:
    """Return a client's request and add its open files to ``files``. Raises ``OSError`` or ``ValueError`` if it is incomplete."""
    size, opened, _, _ = socket.recv_fds(connection, NUM_BYTES, 3)
    files += opened
    num_bytes = int.from_bytes(size)
    if len(size) != NUM_BYTES or len(files) != 3 or num_bytes > MAX_REQUEST_BYTES:
        raise ValueError("an incomplete request")
    with connection.makefile("rb") as reader:
        return WorkerRequest(**json.loads(reader.read(num_bytes)), files=list(files))


def different_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that the imports read and that differ from this process's. Actors set ``SET_BY_ACTORS`` themselves."""
    names = {name for name in (*environment, *os.environ) if name.startswith(READ_AT_IMPORT)}
    names -= READ_LATER | SET_BY_ACTORS.keys()
    return sorted(f"{name}={environment.get(name)}" for name in names if environment.get(name) != os.environ.get(name))


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent, the server, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_worker(request: WorkerRequest) -> None:
    """Run the command of a worker in this process."""
    for target, source in enumerate(request.files):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request.folder)
    program = request.arguments[0]
    set_environment(request.environment, request.folder if program == "-m" else str(Path(program).parent))
    forked_engines.show_environment()
    sys.argv = list(request.arguments)
    if sys.argv[0].endswith(SCRIPT):
        check_actors()
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        run_driver()


def run_driver() -> NoReturn:
    """Run the program of ``sys.argv`` and end as it ends, but do not free the modules, which takes 0.4 s of CPU time.

    The interpreter's other steps at its exit are the same: wait for threads, run exit handlers, flush the output.
    """
    code: object = None
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    for step in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(*step)()
    leave(code or 0)


def check_actors() -> None:
    """Make ranks check that torch, already imported here, has read the variables that they set before its import."""
    import torch

    from slime_like.cluster.start.placement import CPU_ENV, DETERMINISTIC_ENV
    from slime_like.cluster.workers.trainer_worker import RankWorker

    assert CPU_ENV == SET_BY_ACTORS, "the actors set other variables now"
    start = RankWorker.__init__

    def __init__(
        self: RankWorker, name: str, rank: int, world_size: int, stacks_dir: str, env: Mapping[str, str]
    ) -> None:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        expected = SET_BY_ACTORS | DETERMINISTIC_ENV | {"OMP_NUM_THREADS": env["OMP_NUM_THREADS"]}
        different = [item for item in env.items() if item not in expected.items()]
        assert not different, f"torch was imported with other values of {different}: start the workers as Ray does"
        start(self, name, rank, world_size, stacks_dir, env)

    RankWorker.__init__ = __init__


def set_environment(environment: Mapping[str, str], folder: str) -> None:
    """Set the environment, and the state that Python derives from it and from its script's ``folder`` at startup."""
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    inherited = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path]
    sys.path[:] = [folder, *paths, *(path for path in sys.path[1:] if path not in inherited)]
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    if forked_engines.ADDRESS in environment:
        from slime_like.rollout.engine import server

        forked_engines.fork_engines_of(server)


def main(address: str) -> None:
    """Import the workers' modules, listen at ``address`` and serve."""
    import_worker()
    scratch = Path(f"{address}.{secrets.token_hex(4)}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(scratch))
        listener.listen(64)
        scratch.rename(address)
        request = WorkerServer(listener).serve()
    if request is None:
        shutil.rmtree(Path(address).parent, ignore_errors=True)
    else:
        run_worker(request)


if __name__ == "__main__":
    main(sys.argv[1])
