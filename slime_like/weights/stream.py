"""Metadata of tensors sent to an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_like.interfaces import TensorMeta

if TYPE_CHECKING:
    from torch import Tensor


def meta_of(name: str, tensor: Tensor) -> TensorMeta:
    """Return name, shape and dtype of one tensor."""
    return TensorMeta(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
