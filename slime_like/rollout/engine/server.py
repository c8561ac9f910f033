"""SGLang HTTP server of one engine, in a child process that leads its own process group (``main.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.request import ProxyHandler, build_opener

from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.environment import LOOPBACK, child_environment
from slime_like.rollout.engine.free_memory import FIRST_FREE, free_gib
from slime_like.rollout.engine.main import EngineLaunch
from slime_like.rollout.engine.node import DATA_PARALLEL_PORTS, SINGLE_NODE, EngineNode
from slime_like.util.deadline import Deadline, scale
from slime_like.util.ports import PortLease

POLL_S = 0.05
HEALTH_S = 5.0  # limit for one health request to a starting server
KILL_S = 10.0  # limit for a killed process to end
EXIT_S = 8.0  # limit for a dying server to end; on a GPU SGLang waits five seconds before it exits
REPLACED_EXIT_S = 1.0  # the same for a server that is about to be replaced
_DIRECT = build_opener(ProxyHandler({}))  # http_proxy is for other hosts
DERIVED_PORTS = 233  # ZMQ_TCP_PORT_DELTA of sglang.srt.server_args
DECODE_LINE = "slime_like decodes with "


def derived_ports(dp_attention: int) -> range:
    """Return the ports that SGLang may derive from an engine's port, as offsets from that port.

    Without data-parallel attention there are none. With it, SGLang derives one port for the rendezvous and six for its processes,
    and with ``SGLANG_RUST_SERVER`` one more for each attention group.
    """
    return range(DERIVED_PORTS, DERIVED_PORTS + 7 + dp_attention) if dp_attention > 1 else range(0)


class EngineServer:
    """Owner of one engine's server process, which it starts, monitors and stops. Call ``wait_ready`` before the first request.

    An engine on several nodes has a server process on each. The servers of all nodes but the first answer only health checks, and
    need the ``rendezvous`` that ``start`` chooses on the first node.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        admin_key: str,
        host: str = LOOPBACK,
        node: EngineNode = SINGLE_NODE,
        first_free_gib: float | None = None,
    ) -> None:
        """``first_free_gib`` is the result of ``free_before_load`` of the engine's first server whose log contains it.

        It is None if no earlier server's log does, and for an engine on several nodes.
        """
        self._first_free_gib = first_free_gib
        self._spec = spec
        self._admin_key = admin_key
        self._host = host
        self._node = node
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False  # True once ``stop`` has reaped the process: its id may then belong to another one
        self._leases: list[PortLease] = []
        self._scratch: str | None = None
        self._log_begin = 0  # earlier engines of the slot wrote to the same log
        self.url = ""
        self.segments: frozenset[Path] = frozenset()  # named shared memory of its processes seen so far

    @property
    def pid(self) -> int:
        """Process id of the server, and id of the process group of everything that the engine starts.

        Raises ``EngineError`` if the engine was not started.
        """
        if self._process is None:
            raise EngineError("engine was not started: call start() first")
        return self._process.pid

    def start(self) -> None:
        """Spawn the server and return without waiting for it.

        Raises ``EngineError`` if it has been started before, ``SlimeLikeError`` if no port is free, ``OSError`` if a folder, the
        log or the process cannot be created, and the errors of ``child_environment``. After an error, ``stop`` releases the
        ports.
        """
        if self._process is not None:
            raise EngineError(f"engine at {self.url} has already been started; create a new EngineServer")
        port = self._reserve_ports()
        self.url = f"http://{self._host}:{port}"
        self._scratch = tempfile.mkdtemp(prefix=processes.SCRATCH_PREFIX)
        launch = EngineLaunch(self._spec, self._admin_key, self._host, port, self._node.rank, self._node.rendezvous)
        Path(self._spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._spec.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._log_begin = log.tell()
            environment = child_environment(self._spec, self._scratch, self._host, self._node)
            if self._first_free_gib is not None:
                environment[FIRST_FREE] = str(self._first_free_gib)
            self._process = self._spawn(log, environment)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the server has died: wait_ready reports the cause
            self._process.stdin.write(json.dumps(asdict(launch)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def rendezvous(self) -> str:
        """Address (host:port) at which the ranks of an engine on several nodes meet, chosen by ``start`` on the first node.

        It is empty for an engine on one node, and on the first node before ``start``.
        """
        return self._node.rendezvous

    def _reserve_ports(self) -> int:
        """Reserve the server's ports and return the HTTP port. The first of several nodes also chooses ``rendezvous``."""
        several = self._spec.num_nodes > 1
        server = PortLease(self._host, () if several else derived_ports(self._spec.dp_attention))
        self._leases.append(server)
        if several and not self._node.rendezvous:
            meeting = PortLease(self._host, DATA_PARALLEL_PORTS if self._spec.dp_attention > 1 else ())
            self._leases.append(meeting)
            self._node = replace(self._node, rendezvous=f"{self._host}:{meeting.port}")
        return server.port

    def wait_ready(self) -> None:
        """Block until the server responds.

        Raises ``EngineError`` with exit code and last log lines if the server died, ``DeadlineExceeded`` after
        ``spec.start_deadline_s``.
        """
        deadline = Deadline("rollout", "engine start", self._spec.start_deadline_s)
        subject = f"engine at {self.url} (log: {self._spec.log_path})"
        while not self._is_healthy(min(HEALTH_S, deadline.remaining(subject))):
            if not self.alive():
                raise EngineError(f"engine did not start: {self.cause_of_death()}")
            time.sleep(POLL_S)
        self.segments = processes.mapped_segments(self.pid)

    def free_before_load(self) -> float | None:
        """Return the GPU memory in GiB that was free before the engine loaded its model, the minimum over its ranks.

        It is read from the log; the result is None if the log does not contain it, as on a CPU.
        """
        return free_gib(self._log())

    def decode_method(self) -> str:
        """Return the log's description of how a CPU engine decodes (kernels, threads).

        The text is empty on a GPU, and before the engine is ready.
        """
        matches = re.findall(rf"{DECODE_LINE}(.*)", self._log())
        return matches[-1] if matches else ""

    def _log(self) -> str:
        """Return the log of this engine, without those of earlier engines of its slot; empty if it cannot be read."""
        try:
            return Path(self._spec.log_path).read_bytes()[self._log_begin :].decode(errors="replace")
        except OSError:
            return ""

    def alive(self) -> bool:
        """Return whether the server process is running."""
        return self._process is not None and self._process.poll() is None

    def cause_of_death(self) -> str:
        """Return the exit code, the error in the log and the last log lines; or that the engine is alive or was not started.

        This blocks up to ``EXIT_S``, because connections of a dying engine break before the process has ended.
        """
        if self._process is None:
            return f"engine for {self._spec.model_path} was not started"
        try:
            code = self._process.wait(timeout=EXIT_S * scale())
        except subprocess.TimeoutExpired:
            return f"engine at {self.url} (pid {self.pid}) is alive"
        lines = self._last_lines()
        summary = processes.describe_exit(code) + processes.headline(lines)
        log_end = "\n".join(lines[-processes.LOG_LINES :])
        return f"engine at {self.url} (pid {self.pid}) {summary}; end of {self._spec.log_path}:\n{log_end}"

    def exit_summary(self) -> str:
        """Return one line that says how the server ended; empty if it does not end within a second.

        Call it before the server is replaced.
        """
        assert self._process is not None, "it was started"
        try:
            summary = processes.describe_exit(self._process.wait(REPLACED_EXIT_S * scale()))
        except subprocess.TimeoutExpired:
            return ""
        return summary + processes.headline(self._last_lines())

    def stop(self) -> None:
        """Kill the engine's process group and nothing else, and remove its temporary folder and shared memory. Idempotent.

        This blocks up to ``KILL_S`` until the server has ended. The signal is SIGKILL: SGLang's SIGTERM handler polls every
        five seconds, and an engine has nothing to save.
        """
        if self._process is not None and not self._is_stopped:
            self.segments |= processes.mapped_segments(self._process.pid)
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process in a driver call ends after that call
                self._process.wait(KILL_S * scale())
                self._is_stopped = True
            processes.remove_segments(self.segments)
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the server has not read what ``start`` wrote
                self._process.stdin.close()
        for lease in self._leases:
            lease.release()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def kill(self) -> None:
        """Kill the engine's process group without waiting for its end. Unlike ``stop``, keep temporary folder and shared memory.

        Once ``stop`` has seen the server end, do nothing. Raises ``EngineError`` if the engine was not started.
        """
        if self._is_stopped:
            return
        with contextlib.suppress(ProcessLookupError):  # the group has already ended
            os.killpg(self.pid, signal.SIGKILL)

    def _last_lines(self) -> list[str]:
        return processes.last_lines(self._spec.log_path, self._log_begin)

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ``main.py`` as the leader of a new session, with a pipe as its stdin."""
        return subprocess.Popen(
            [sys.executable, "-m", "slime_like.rollout.engine.main"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def _is_healthy(self, seconds: float) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/health", timeout=seconds) as reply:
                return reply.status == 200
        except (OSError, HTTPException):
            return False
