"""Check that ranks on other nodes than the driver's see ``run.dir``, before any of them builds a model."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_like.cluster.workers.calls import wait_all
from slime_like.cluster.workers.trainer_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline
from slime_like.util.reading import reason


def check_shared(
    run_dir: Path,
    groups: Sequence[RankGroup[Any]],
    deadline: Deadline,
    waiting: Callable[[str], None] | None = None,
) -> None:
    """Raise ``ConfigError`` naming each node whose ranks do not see a file that the driver writes to ``run_dir``.

    Each rank writes its part of a checkpoint to ``run_dir``, and the driver completes the checkpoint there. ``waiting`` as in
    ``wait_all``.
    """
    marker = run_dir / f".shared_{secrets.token_hex(8)}"
    try:
        marker.touch()
    except OSError as error:
        raise ConfigError(f"run.dir={str(run_dir)!r} cannot be written ({reason(error)}): free some space") from error
    refs: Refs[str] = {}
    try:
        for group in groups:
            refs |= group.start(RankWorker.node_without_file, str(marker))
        addresses = wait_all(refs, deadline, waiting)
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
    if nodes := sorted({address for address in addresses.values() if address}):
        ranks = ", ".join(name for name, address in addresses.items() if address)
        raise ConfigError(
            f"run.dir={str(run_dir)!r} is not shared with {', '.join(nodes)} ({ranks}): these ranks and the driver write one "
            "checkpoint together. Set run.dir to a folder of a file system that all nodes mount at the same path, or place all "
            "ranks on the driver's node (placement.actor_num_nodes=1)"
        )
