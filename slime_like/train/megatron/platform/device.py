"""Device of megatron's parameters."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """Return the device on which megatron creates parameters: this rank's GPU, or the CPU under the host facade."""
    from megatron.core.transformer import module

    return torch.device(module.torch.cuda.current_device())
