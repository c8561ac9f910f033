"""Check that the folders of initial weights exist on the nodes of all ranks, before any rank builds its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_like.cluster.workers.calls import wait_all
from slime_like.cluster.workers.trainer_group import RankGroup, Refs
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.config.schema.resolved import CriticSpec, RankSpec, TeacherSpec
from slime_like.errors import CheckpointError
from slime_like.util.deadline import Deadline

MAX_NAMED = 3  # ranks that an error names


def check_node_paths(
    groups: Sequence[tuple[RankGroup[Any], RankSpec | CriticSpec | TeacherSpec]],
    deadline: Deadline,
    waiting: Callable[[str], None] | None = None,
) -> None:
    """Raise ``CheckpointError`` if a folder from which a rank loads weights is missing on the rank's node.

    ``waiting``: see ``wait_all``.
    """
    keys: dict[str, Mapping[str, str]] = {}  # rank -> path -> config key
    refs: Refs[dict[str, str]] = {}
    for group, spec in groups:
        paths = weight_paths(spec)
        group_refs = group.start(RankWorker.missing_paths, tuple(paths))
        keys |= dict.fromkeys(group_refs, paths)
        refs |= group_refs
    missing = [
        (f"{keys[rank][path]}={path!r}", f"{address} ({rank})")
        for rank, addresses in wait_all(refs, deadline, waiting).items()
        for path, address in addresses.items()
    ]
    if missing:
        texts = [f"{setting} does not exist on {place}" for setting, place in missing[:MAX_NAMED]]
        more = f" and {len(missing) - MAX_NAMED} more" * (len(missing) > MAX_NAMED)
        raise CheckpointError(
            f"{'; '.join(texts)}{more}: copy the folder to the same path there, or use a file system that all nodes mount at the "
            "same path"
        )


def weight_paths(spec: RankSpec | CriticSpec | TeacherSpec) -> dict[str, str]:
    """Return the folders that a rank with ``spec`` reads when it builds its model, with their config keys."""
    rank = spec if isinstance(spec, RankSpec) else spec.rank
    settings: dict[str, str | None] = {rank.model_key: rank.model.hf_checkpoint}
    if isinstance(spec, CriticSpec):
        settings["critic.load"] = spec.load
    elif isinstance(spec, RankSpec):
        settings["model.megatron_checkpoint"] = rank.model.megatron_checkpoint
        settings["model.ref_checkpoint"] = rank.model.ref_checkpoint if rank.needs_reference else None
        settings["teacher.hf_checkpoint"] = rank.teacher_checkpoint
    paths: dict[str, str] = {}
    for key, path in settings.items():
        if path is not None:
            paths.setdefault(path, key)
    return paths
