"""One SGLang engine as a Ray actor, which owns the server process, reports why it died, and restarts it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from ray.util import get_node_ip_address

from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.config.rules.trained_sampling import changing_variables
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.server import EngineServer
from slime_like.util.caches import keep_caches_private

VISIBLE_DEVICES = "SLIME_LIKE_ENGINE_GPUS"  # set by the placement for an engine's actor


class EngineActor:
    """Actor that starts the server at construction; ``ready`` waits for it. Methods may run concurrently."""

    def __init__(self, name: str, spec: EngineSpec, admin_key: str, stacks_dir: str, env: Mapping[str, str]) -> None:
        """Start the server at Ray's address: loopback in a single-machine cluster, else the node's address."""
        os.environ.update(env)  # the server inherits it
        for variable in (
            changing_variables(os.environ) if spec.feeds_training else ()
        ):  # set on this node: the driver has rejected its own
            del os.environ[variable]
        keep_caches_private()
        dump_stacks_on_signal(Path(stacks_dir), name.replace(" ", "_"))
        self._name = name
        self._spec = spec
        self._admin_key = admin_key
        if VISIBLE_DEVICES in os.environ:  # Ray hides every GPU from an actor that requests none
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
        self._closing = False
        self._server_lock = threading.Lock()  # guards _server: a stop may arrive during a restart
        self._server = self._start()
        self._exit_summary: str | None = None  # summary of a server that ``stop_server`` has stopped

    def _start(self) -> EngineServer:
        if self._closing:
            raise EngineError(f"{self._name} is not restarted: the run is shutting down")
        server = EngineServer(self._spec, admin_key=self._admin_key, host=str(get_node_ip_address()))
        server.start()
        return server

    def ready(self) -> EngineAddress:
        """Wait until the engine responds and return its address."""
        self._server.wait_ready()
        return EngineAddress(self._name, self._server.url, self._admin_key, self._spec.tp)

    def stop_server(self) -> None:
        """Stop the server, whatever its state; ``restart`` starts another one."""
        self._exit_summary = self._server.exit_summary()
        with self._server_lock:
            self._server.stop()

    def restart(self) -> tuple[EngineAddress, str]:
        """Replace the server, whatever its state; return the new address and how the old server ended."""
        exit_summary = self._server.exit_summary() if self._exit_summary is None else self._exit_summary
        self._exit_summary = None
        with self._server_lock:
            self._server.stop()
            self._server = self._start()
        return self.ready(), exit_summary

    def stopped_pids(self) -> tuple[int, ...]:
        """Return the processes of the server that are stopped, as by SIGSTOP."""
        return processes.stopped_pids(self._server.pid) if self._server.alive() else ()

    def inject_fault(self, signal_name: str, part: str = "") -> None:
        """Inject a fault of ``chaos.*``: signal one ``part`` of the server, or all of it, if it is running."""
        number = signal.Signals[signal_name]
        with contextlib.suppress(ProcessLookupError):  # restarting after an earlier fault
            if not part:
                os.killpg(self._server.pid, number)
            for pid in processes.pids_of_part(self._server.pid, part) if part else ():
                os.kill(pid, number)

    def cause_of_death(self, suspected: bool) -> str:
        """Return exit code and last log lines of a dead server, empty if alive; if ``suspected``, wait for it to die."""
        cause = self._server.cause_of_death() if suspected or not self._server.alive() else ""
        return "" if self._server.alive() else cause

    def stop(self) -> None:
        """Stop the server and everything it started."""
        with self._server_lock:
            self._closing = True
            self._server.stop()
