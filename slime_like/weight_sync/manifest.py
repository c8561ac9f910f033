"""Manifest of a push: each tensor of the HF checkpoint once, in the checkpoint's shape. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """Return name, shape and dtype of one tensor."""
    return TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def merge(stages: Sequence[Iterable[TensorMeta]]) -> dict[str, TensorMeta]:
    """Merge the manifests of all pipeline stages into a dict by tensor name.

    Raises ``WeightSyncError`` if a tensor would be sent more than once; tied embeddings too must be sent by one stage only.
    """
    metas = [meta for stage in stages for meta in stage]
    duplicates = sorted(name for name, count in Counter(meta.name for meta in metas).items() if count > 1)
    if duplicates:
        raise WeightSyncError(
            f"more than one pipeline stage would send {', '.join(duplicates[:3])} ({len(duplicates)} tensors): the export must "
            "send each tensor from one stage"
        )
    return {meta.name: meta for meta in metas}


def check(version: int, manifest: dict[str, TensorMeta], tensors: Iterable[TensorMeta]) -> None:
    """Raise ``WeightSyncError`` unless the sent ``tensors`` are exactly those of the manifest."""
    actual = Counter(tensors)
    expected = Counter(manifest.values())
    missing = sorted(meta.name for meta in expected - actual)
    unexpected = sorted(meta.name for meta in actual - expected)
    if missing or unexpected:
        raise WeightSyncError(
            f"push of version {version} is incomplete: {len(missing)} tensors are missing ({', '.join(missing[:3])}), and "
            f"{len(unexpected)} are unexpected or have a different dtype or shape ({', '.join(unexpected[:3])})"
        )
