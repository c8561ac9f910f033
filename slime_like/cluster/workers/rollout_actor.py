"""The rollout manager as an async Ray actor: collecting and pushing interleave in one event loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import sync
from slime_like.cluster.supervise.reaper import reaper
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.cluster.workers.engine_supervisor import RayEngineSupervisor
from slime_like.cluster.workers.trainer_worker import EngineAddress
from slime_like.data.faults import Recovery
from slime_like.errors import CheckpointError
from slime_like.interfaces import DataSource
from slime_like.rollout.generate.evaluate import Evaluated
from slime_like.rollout.manager import Collected, ManagerSpec, RolloutManager
from slime_like.rollout.pool.probe import ProbeScores
from slime_like.types import Prompt
from slime_like.util.printed import record_streams


class RolloutActor:
    """A thin wrapper of ``RolloutManager``."""

    def __init__(self, stacks_dir: str, env: Mapping[str, str], log_path: str) -> None:
        """Redirect the output of this process and its children, including user code, to ``log_path``."""
        os.environ.update(env)
        _redirect_output(Path(log_path))
        record_streams()
        self._reaper = reaper()
        dump_stacks_on_signal(Path(stacks_dir), "rollout_manager")

    async def connect(
        self,
        spec: ManagerSpec,
        source: DataSource,
        heldout: Mapping[str, Sequence[Prompt]],
        engines: Sequence[tuple[Any, EngineAddress]],
    ) -> None:
        """Create the manager for ``engines``: (actor, address) of each."""
        self._supervisors = {
            address.name: RayEngineSupervisor(actor, address, spec.rollout) for actor, address in engines
        }
        self._manager = RolloutManager(spec, source, heldout, list(self._supervisors.values()))

    async def collect(self, rollout_id: int) -> Collected:
        """See ``RolloutManager.collect``."""
        return await self._manager.collect(rollout_id)

    async def evaluate(self) -> Evaluated:
        """See ``RolloutManager.evaluate``."""
        return await self._manager.evaluate()

    async def begin_push(self) -> tuple[EngineAddress, ...]:
        """See ``RolloutManager.begin_push``; return the addresses of the participating engines."""
        return tuple(self._supervisors[name].address for name in await self._manager.begin_push())

    async def commit_push(self, version: int) -> None:
        """See ``RolloutManager.commit_push``."""
        await self._manager.commit_push(version)

    async def skip_push(self, version: int) -> None:
        """See ``RolloutManager.skip_push``."""
        await self._manager.skip_push(version)

    async def abort_push(self) -> None:
        """See ``RolloutManager.abort_push``."""
        await self._manager.abort_push()

    async def starved(self) -> None:
        """See ``RolloutManager.starved``."""
        await self._manager.starved()

    async def last_recoveries(self) -> tuple[Recovery, ...]:
        """See ``RolloutManager.last_recoveries``."""
        return self._manager.last_recoveries()

    async def lose_reward_server(self, seconds: float) -> None:
        """See ``RewardPool.lose_server``."""
        self._manager.lose_reward_server(seconds)

    async def probe(self) -> tuple[ProbeScores, ...]:
        """See ``RolloutManager.probe``."""
        return await self._manager.probe()

    async def save_state(self, next_rollout: int, leftover: str) -> dict[str, Any]:
        """See ``RolloutManager.save_state``. Raises ``CheckpointError`` if a file cannot be written."""
        path = Path(leftover)
        try:
            state = self._manager.save_state(next_rollout, path)
            for written in path.parent.glob(f"{path.stem}*{path.suffix}"):
                sync(written)
        except OSError as error:
            raise CheckpointError(f"{leftover}: the save failed ({error.strerror}); is the disk full?") from error
        return state

    async def load_state(self, state: Mapping[str, Any], leftover: str) -> None:
        """See ``RolloutManager.load_state``."""
        self._manager.load_state(state, Path(leftover))

    async def stop(self) -> None:
        """See ``RolloutManager.stop``; also kill processes started by user code."""
        await self._manager.stop()
        if self._reaper is not None:
            self._reaper.close()


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
