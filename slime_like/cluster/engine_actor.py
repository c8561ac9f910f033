"""One SGLang engine as a Ray actor: owns the server's process and tells why it died."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ray.util import get_node_ip_address

from slime_like.cluster.stacks import dump_stacks_on_signal
from slime_like.cluster.trainer_worker import EngineAddress
from slime_like.config.resolved import EngineSpec
from slime_like.rollout.server import EngineServer

VISIBLE_DEVICES = "SLIME_LIKE_ENGINE_GPUS"  # set by the placement on an engine's actor


class EngineActor:
    """Starts the server when made; ``ready`` waits for it."""

    def __init__(self, name: str, spec: EngineSpec, admin_key: str, stacks_dir: str, env: Mapping[str, str]) -> None:
        """The server listens where Ray does: on loopback in a cluster of this machine alone, else at the node's address."""
        os.environ.update(env)  # the server inherits it
        dump_stacks_on_signal(Path(stacks_dir), name.replace(" ", "_"))
        self._name = name
        self._spec = spec
        self._admin_key = admin_key
        if VISIBLE_DEVICES in os.environ:  # Ray hides every GPU from an actor that asks for none
            os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
        self._server = EngineServer(spec, admin_key=admin_key, host=str(get_node_ip_address()))
        self._server.start()

    def ready(self) -> EngineAddress:
        """Where the engine listens, once it answers."""
        self._server.wait_ready()
        return EngineAddress(self._name, self._server.url, self._admin_key, self._spec.tp)

    def cause_of_death(self, suspected: bool) -> str:
        """Exit code and last log lines of a dead server, empty while it lives; waits for one that is suspected to die."""
        cause = self._server.cause_of_death() if suspected or not self._server.alive() else ""
        return "" if self._server.alive() else cause

    def stop(self) -> None:
        """Stop the server and everything it started."""
        self._server.stop()
