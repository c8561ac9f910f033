"""What a push must carry: every tensor of the HF checkpoint once, in the shape the checkpoint has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorMeta


def merge(stages: Sequence[Iterable[TensorMeta]]) -> dict[str, TensorMeta]:
    """The manifests of all pipeline stages as one.

    Raises ``WeightSyncError`` when two stages would send the same tensor (tied embeddings travel once).
    """
    metas = [meta for stage in stages for meta in stage]
    twice = sorted(name for name, count in Counter(meta.name for meta in metas).items() if count > 1)
    if twice:
        raise WeightSyncError(
            f"two pipeline stages would send {', '.join(twice[:3])} ({len(twice)} in all): each tensor has one owner"
        )
    return {meta.name: meta for meta in metas}


def check(version: int, manifest: dict[str, TensorMeta], sent: Iterable[TensorMeta]) -> None:
    """Raise ``WeightSyncError`` unless what was sent is exactly what the manifest announced."""
    seen = Counter(meta for meta in sent)
    expected = Counter(manifest.values())
    missing = sorted(meta.name for meta in expected - seen)
    foreign = sorted(meta.name for meta in seen - expected)
    if missing or foreign:
        raise WeightSyncError(
            f"push of version {version} is not whole: {len(missing)} tensors missing ({', '.join(missing[:3])}), "
            f"{len(foreign)} foreign or of another shape ({', '.join(foreign[:3])})"
        )
