"""Where megatron puts what it creates."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """Where megatron creates parameters: the GPU of this rank, or the CPU under the host facade."""
    from megatron.core.transformer import module

    return torch.device(module.torch.cuda.current_device())
