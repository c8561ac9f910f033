"""Ray actor for the part of an engine on a node other than its first; the first node's actor starts it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ray.util import get_node_ip_address

from slime_like.cluster.workers.engine_process import prepare_process
from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.node import EngineNode
from slime_like.rollout.engine.server import EngineServer

POLL_S = 0.1


class EnginePart:
    """Actor that starts the server of its node at construction. Ray ends it when the first node's actor ends.

    The server of this actor then reads end-of-file and ends too, so that no process of the engine outlives the first
    node's actor.
    """

    def __init__(
        self, name: str, spec: EngineSpec, admin_key: str, stacks_dir: str, env: Mapping[str, str], node: EngineNode
    ) -> None:
        prepare_process(name, spec, stacks_dir, env)
        self._closing = threading.Event()
        self._rank_pids: tuple[int, ...] = ()  # set by ``ready``
        self._server = EngineServer(spec, admin_key=admin_key, host=str(get_node_ip_address()), node=node)
        self._server.start()

    def ready(self) -> None:
        """Wait until the ranks of this node have loaded the model. Raises the errors of ``EngineServer.wait_ready``."""
        self._server.wait_ready()
        self._rank_pids = processes.rank_pids(self._server.pid)

    def wait_for_end(self) -> str:
        """Wait until the server or a rank ends; return how it ended, or an empty text once ``stop`` is called.

        Ranks are watched once ``ready`` has returned. If a rank has ended, kill the server: in an engine without
        data-parallel attention, the server of a node other than the first stays alive when a signal ends one of the node's
        ranks. This watch of the ranks is needed until SGLang's watchdog of subprocesses covers all nodes.
        """
        ended_pids: tuple[int, ...] = ()
        while self._server.alive() and not (ended_pids := processes.ended_pids(self._rank_pids)):
            if self._closing.wait(POLL_S):
                return ""
        if self._closing.is_set():
            return ""
        if ended_pids:
            self._server.kill()
        rank = f"the process of a rank (pid {ended_pids[0]}) has ended; " if ended_pids else ""
        return rank + self._server.cause_of_death()

    def stopped_pids(self) -> tuple[int, ...]:
        """Return the pids of the server's processes that are suspended (SIGSTOP)."""
        return processes.stopped_pids(self._server.pid) if self._server.alive() else ()

    def stop(self) -> None:
        """Stop the server and everything it started."""
        self._closing.set()
        self._server.stop()
