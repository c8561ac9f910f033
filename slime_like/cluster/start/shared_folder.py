"""Find the nodes that do not share ``run.dir`` with the driver's node, before any of their ranks builds a model."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.cluster.workers.calls import wait_all
from slime_like.cluster.workers.trainer_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline
from slime_like.util.reading import reason


def find_separate_nodes(
    run_dir: Path,
    groups: Sequence[RankGroup[Any]],
    deadline: Deadline,
    waiting: Callable[[str], None] | None = None,
) -> list[str]:
    """Return the addresses of nodes whose ranks do not see a file that the driver writes to ``run_dir``.

    All ranks of a group with such a node are told the addresses. In later saves, a rank on such a node writes its part of
    the checkpoint to a folder on its own node and sends that part to rank 0, which completes the checkpoint. Raises
    ``ConfigError`` if rank 0 of a group does not see the file, or if ``run_dir`` cannot be written. ``waiting``: see
    ``wait_all``.
    """
    marker = run_dir / f".shared_{secrets.token_hex(8)}"
    try:
        marker.touch()
    except OSError as error:
        raise ConfigError(
            f"run.dir={str(run_dir)!r} cannot be written ({reason(error)}): free some space, or correct its permissions"
        ) from error
    try:
        refs = [group.start(RankWorker.node_without_file, str(marker)) for group in groups]
        all_refs: Refs[str] = {name: ref for group_refs in refs for name, ref in group_refs.items()}
        addresses = wait_all(all_refs, deadline, waiting)
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
    nodes = [tuple(addresses[name] for name in group_refs) for group_refs in refs]
    if unshared := {
        next(iter(group_refs)): names[0] for group_refs, names in zip(refs, nodes, strict=True) if names[0]
    }:
        raise ConfigError(_unshared_message(run_dir, unshared, len(groups)))
    acknowledgements: Refs[None] = {}
    for group, group_nodes in zip(groups, nodes, strict=True):
        if any(group_nodes):
            acknowledgements |= group.start(RankWorker.set_separate_nodes, group_nodes)
    wait_all(acknowledgements, deadline, waiting)
    return sorted({address for address in addresses.values() if address})


def _unshared_message(run_dir: Path, unshared: Mapping[str, str], num_groups: int) -> str:
    """Return the error message for rank groups whose rank 0 does not see ``run_dir``.

    ``unshared`` maps the names of these ranks to the addresses of their nodes. The message suggests starting ``train.py`` on
    such a node only if rank 0 of all ``num_groups`` groups is there.
    """
    rank, address = next(iter(unshared.items()))
    is_one_node = len(unshared) == num_groups and len(set(unshared.values())) == 1
    return (
        f"run.dir={str(run_dir)!r} is not shared with {address} ({rank}), which completes the checkpoints that the driver "
        f"continues from: {f'start train.py on {address}, or ' * is_one_node}set run.dir to a folder of a file system that all "
        "nodes mount at the same path"
    )
