"""The rollout manager as an async Ray actor. Its event loop interleaves the collection of samples with weight pushes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from ray.actor import ActorHandle

from slime_like.cluster.supervise.reaper import reaper
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_starter import EngineStarter, EngineTemplate
from slime_like.cluster.workers.engine_supervisor import RayEngineFactory
from slime_like.data.share import SINGLE
from slime_like.interfaces import DataSource, EngineAddress
from slime_like.rollout.manager import ManagerSpec, RolloutManager
from slime_like.types import Prompt
from slime_like.util.printed import record_streams


class RolloutActor(RolloutManager):
    """Rollout manager in a separate process. The process starts while the engines start; ``connect`` completes the manager."""

    def __init__(
        self, stacks_dir: str, env: Mapping[str, str], log_path: str, file_name: str = SINGLE.file_name
    ) -> None:
        """Set the variables ``env``, and redirect the output of this process and its children to ``log_path``.

        The children include processes of user code. If the run's supervisor process cannot kill them, because this is a node
        of a joined Ray cluster, start a ``Reaper`` that does. Raises ``SlimeLikeError`` if the ``Reaper`` does not start.
        ``file_name`` names this process in ``stacks_dir``.
        """
        os.environ.update(env)
        _redirect_output(Path(log_path))
        record_streams()
        self._reaper = reaper()
        self._starter: EngineStarter | None = None  # until ``connect``
        self._is_connected = False
        dump_stacks_on_signal(Path(stacks_dir), file_name)

    async def connect(
        self,
        spec: ManagerSpec,
        source: DataSource,
        heldout: Mapping[str, Sequence[Prompt]],
        engines: Sequence[tuple[ActorHandle[EngineActor], EngineAddress]],
        template: EngineTemplate,
    ) -> None:
        """Initialize the manager for its share of ``engines``, the (actor, address) pairs of all engines of the run.

        Further engines are started with ``template``.
        """
        own_engines = spec.share.of(list(enumerate(engines)))
        actors = {index: actor for index, (actor, _) in own_engines}
        hosts = {index: str(urlsplit(address.url).hostname) for index, (_, address) in enumerate(engines)}
        self._starter = EngineStarter(template, actors, hosts, spec.share)
        factory = RayEngineFactory(self._starter, spec.rollout, spec.routing, spec.health.timeout_s)
        supervisors = [factory.supervisor(index, *engine) for index, engine in own_engines]
        super().__init__(spec, source, heldout, supervisors, factory)
        self._is_connected = True

    async def stop(self) -> None:
        """Stop the manager, then the engines that it has started, then user code's processes if there is a ``Reaper`` for them.

        If one of the three fails to stop, the others are stopped nevertheless. May be called before ``connect``.
        """
        async with AsyncExitStack() as stack:  # all parts are stopped, even if one raises
            if self._reaper is not None:
                stack.callback(self._reaper.close)
            if self._starter is not None:
                stack.push_async_callback(self._starter.stop)
            if self._is_connected:
                await super().stop()


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process and its children to ``path``; if that fails, they stay in Ray's log."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = log  # Ray's streams use separate file descriptors
