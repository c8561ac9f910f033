"""Weights that overlap_param_gather gathers during the forward pass."""

from __future__ import annotations

import torch


def wait_for_weights(part: torch.nn.Module) -> None:
    """Wait until overlap_param_gather has gathered the weights of ``part``. Call it before reading them outside its forward."""
    for hook in part._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]  no public function lists hooks
        hook(part, ())
