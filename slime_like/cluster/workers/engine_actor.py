"""One SGLang engine as a Ray actor, which owns the server process, reports why the server died, and restarts it.

The actor of an engine on several nodes runs on the first of them; it starts and ends the actors on the other nodes
(``EngineParts``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Mapping, Sequence

from ray.util import get_node_ip_address

from slime_like.cluster.workers.engine_parts import EngineParts, NodeSlot, PartSettings
from slime_like.cluster.workers.engine_process import prepare_process
from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.node import SINGLE_NODE, EngineNode
from slime_like.rollout.engine.server import EngineServer
from slime_like.util.deadline import Deadline


class EngineActor:
    """Actor that starts the server at construction; ``ready`` waits for it. Methods may run concurrently."""

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        admin_key: str,
        stacks_dir: str,
        env: Mapping[str, str],
        other_nodes: Sequence[NodeSlot] = (),
        gpus: tuple[int, ...] = (),
    ) -> None:
        """Start the server on the address that Ray uses: loopback if the run started Ray itself, the node's in a joined cluster.

        Also start the parts of the engine on ``other_nodes``. ``gpus``: see ``EngineAddress``.
        """
        prepare_process(name, spec, stacks_dir, env)
        self._name = name
        self._spec = spec
        self._gpus = gpus
        self._admin_key = admin_key
        self._other_nodes = tuple(other_nodes)
        self._settings = PartSettings(name, spec, admin_key, stacks_dir, env)
        self._closing = False
        self._server_lock = threading.Lock()  # guards _server: a stop may arrive during a restart
        self._parts: EngineParts | None = None
        self._first_free_gib: float | None = None  # on a GPU before the first start; None on several nodes
        self._server = self._start()
        self._exit_summary: str | None = None  # summary of a server that ``stop_server`` has stopped

    def _start(self) -> EngineServer:
        if self._closing:
            raise EngineError(f"{self._name} is not restarted: the run is shutting down")
        host = str(get_node_ip_address())
        hosts = (host, *(slot.address for slot in self._other_nodes)) if self._other_nodes else ()
        node = EngineNode(0, hosts) if hosts else SINGLE_NODE
        server = EngineServer(
            self._spec, admin_key=self._admin_key, host=host, node=node, first_free_gib=self._first_free_gib
        )
        server.start()
        if hosts:
            node = EngineNode(0, hosts, server.rendezvous)
            try:
                self._parts = EngineParts(self._settings, self._other_nodes, node, server.kill)
            except BaseException:
                server.stop()
                raise
        return server

    def _stop(self) -> None:
        """Stop the servers on all nodes. The caller holds ``_server_lock``."""
        if self._parts is None:
            self._server.stop()
        else:
            self._parts.stop(self._server.stop)

    def ready(self) -> EngineAddress:
        """Wait until the engine responds on all nodes and return its address.

        Raises ``EngineError`` if a server died, ``EngineNodeLost`` if another node of the engine is lost, and
        ``DeadlineExceeded`` after ``spec.start_deadline_s``.
        """
        spec, parts = self._spec, self._parts
        deadline = Deadline(self._name, "engine start", spec.start_deadline_s)
        try:
            self._server.wait_ready()
        except EngineError as error:
            if parts is not None:
                parts.raise_loss(error)
            raise
        if parts is not None:
            parts.wait_ready(deadline)
        return EngineAddress(self._name, self._server.url, self._admin_key, spec.tp, spec.num_nodes, self._gpus)

    def _describe_exit(self) -> str:
        """Return a line on how the engine's server on this node and any lost part ended; empty if neither has ended."""
        cause = "" if self._parts is None else self._parts.cause_of_loss
        summary = self._server.exit_summary()
        return f"{summary or 'ended'}; {cause.splitlines()[0]}" if cause else summary

    def stop_server(self) -> None:
        """Stop the engine's servers on all nodes, whatever their state; ``restart`` starts new ones."""
        self._exit_summary = self._describe_exit()
        with self._server_lock:
            self._stop()

    def restart(self) -> tuple[EngineAddress, str]:
        """Replace the servers on all nodes, whatever their state; return the new address and how the old engine ended.

        The second result is one line, empty if the old engine was alive. Raises the errors of ``ready``, and ``EngineError``
        if ``stop`` was called.
        """
        exit_summary = self._describe_exit() if self._exit_summary is None else self._exit_summary
        self._exit_summary = None
        if self._first_free_gib is None and not self._other_nodes:
            self._first_free_gib = self._server.free_before_load()
        with self._server_lock:
            self._stop()
            self._server = self._start()
        return self.ready(), exit_summary

    def stopped_pids(self) -> tuple[int, ...]:
        """Return the pids of the engine's suspended processes (SIGSTOP) on all nodes; none if this node's server has ended.

        Parts on other nodes that do not answer in time are left out.
        """
        if not self._server.alive():
            return ()
        return processes.stopped_pids(self._server.pid) + (() if self._parts is None else self._parts.stopped_pids())

    def inject_fault(self, signal_name: str, part: str = "") -> None:
        """Inject a fault of ``chaos.*``: send a signal to the processes of this node's server, if the server is alive.

        ``part`` restricts the signal to processes of one kind (see ``processes.pids_of_part``); empty for all processes.
        """
        number = signal.Signals[signal_name]
        if not self._server.alive():  # restarting after an earlier fault, or stopped
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
            if not part:
                os.killpg(self._server.pid, number)
            for pid in processes.pids_of_part(self._server.pid, part) if part else ():
                os.kill(pid, number)

    def cause_of_death(self, suspected: bool) -> str:
        """Return why the server died; an empty text if it is alive.

        The text names any loss of a part on another node, then the exit code of the server and the end of its log. If the
        death is only ``suspected``, wait a few seconds for it.
        """
        cause = self._server.cause_of_death() if suspected or not self._server.alive() else ""
        if self._server.alive():
            return ""
        return "\n".join(filter(None, ("" if self._parts is None else self._parts.cause_of_loss, cause)))

    def stop(self) -> None:
        """Stop the engine and everything it started, on all nodes. It cannot be restarted afterwards."""
        with self._server_lock:
            self._closing = True
            self._stop()
