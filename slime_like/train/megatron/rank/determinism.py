"""What a rank does before it builds a model that has to give the same bits each time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from slime_like.errors import ConfigError
from slime_like.train.megatron.families.base import Weight
from slime_like.util import exact


def require(device: torch.device, weights: Iterable[Weight]) -> None:
    """On a GPU: torch picks deterministic kernels, or says which operation has none. On a CPU: products of the model's
    sizes keep rows apart on this machine, or ``ConfigError``."""
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        return
    shapes = [shape for weight in weights for shape in weight.shapes if len(shape) == 2]
    if problem := exact.check_machine((rows, columns) for rows, columns in shapes):
        raise ConfigError(f"run.deterministic=true cannot hold on this machine: {problem}; set run.deterministic=false")
