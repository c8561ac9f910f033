"""Device of megatron's parameters."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """Return the device of megatron's parameters: this rank's GPU, or the CPU if ``host`` has replaced ``torch``."""
    from megatron.core.transformer import module

    return torch.device(module.torch.cuda.current_device())
