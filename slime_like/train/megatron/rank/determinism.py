"""Requirements of bitwise reproducibility on a rank, checked before its model is built."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime_like.errors import ConfigError
from slime_like.train.megatron.families.base import Weight
from slime_like.util import batch_invariant


def require(device: torch.device, weights: Iterable[Weight]) -> None:
    """Require deterministic results on ``device``.

    On a GPU, switch torch to deterministic kernels; an operation without such a kernel then raises an error. On a CPU,
    raise ``ConfigError`` if some weight has a size for which a row of the matrix product depends on the other rows.
    """
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        return
    shapes = [shape for weight in weights for shape in weight.shapes if len(shape) == 2]
    if problem := batch_invariant.check_machine((rows, columns) for rows, columns in shapes):
        raise ConfigError(
            f"run.deterministic=true is impossible on this machine: {problem}; set run.deterministic=false"
        )
