"""Copies of recurrent states during decode steps, for the prefix cache (SGLang's strategy ``extra_buffer``).

When the length of a request is a common multiple of ``mamba_track_interval`` (256 by default), 64 and the page size, its
states are copied to slots that the prefix cache keeps. The two functions for this replace those of
``sglang.kernels.ops.mamba.mamba_state_scatter_triton``. Axes: B requests, S slots, N layers.
"""

from __future__ import annotations

from torch import Tensor


def copy_states(
    conv_states: Tensor,
    delta_states: Tensor,
    slots_B: Tensor,
    mask_B: Tensor,
    targets_B: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """For the requests that ``mask_B`` selects, copy the states [S, ...] from slots ``slots_B`` to slots ``targets_B``."""
    copy_states_of_all_layers(conv_states[None], delta_states[None], slots_B, mask_B, targets_B, batch_size)


def copy_states_of_all_layers(
    conv_states: Tensor,
    delta_states: Tensor,
    slots_B: Tensor,
    mask_B: Tensor,
    targets_B: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """For the requests that ``mask_B`` selects, copy the states [N, S, ...] from slots ``slots_B`` to slots ``targets_B``."""
    rows = mask_B[:batch_size].nonzero()[:, 0]
    if len(rows):
        for pool in (conv_states, delta_states):
            pool[:, targets_B[rows].long()] = pool[:, slots_B[rows].long()]


def unpinned(tensor: Tensor, device: object = None) -> Tensor:
    """Return ``tensor`` itself, without pinning it.

    This function replaces ``Tensor.pin_memory``, which needs a GPU and which SGLang calls for decode-step masks.
    """
    return tensor
