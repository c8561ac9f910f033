"""Rotary embedding (https://arxiv.org/abs/2104.09864) with transformers' frequencies, including scaled variants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_like.config.rules.hf import ROPE_TYPES
from slime_like.errors import ConfigError


class Rotary(torch.nn.Module):
    """Rotary angles at positions, for the first ``partial_rotary_factor`` of a head's channels.

    ``scale`` multiplies their cosines and sines; it is 1 except with YaRN (https://arxiv.org/abs/2309.00071). Raises
    ``ConfigError`` on unsupported scaling.
    """

    def __init__(self, hf: Any, head_dim: int, device: torch.device, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved  # True: channels 0 and 1 are a pair; False: channels 0 and dim / 2
        parameters: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ConfigError(f"config.json: rope_type={kind!r} is not supported; only {', '.join(ROPE_TYPES)}")
        if kind == "default":
            rotary_dim = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
            exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
            frequencies, self.scale = 1.0 / (float(parameters["rope_theta"]) ** exponent), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
        self.frequencies = frequencies.to(device)  # [dim / 2]; a plain tensor: never cast to bfloat16

    def forward(self, position_ids: Tensor) -> Tensor:
        """Map position_ids [P] to angles [P, 1, 1, dim]."""
        angles = torch.outer(position_ids.to(self.frequencies.dtype), self.frequencies)
        of_channels = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return of_channels[:, None, None, :]
