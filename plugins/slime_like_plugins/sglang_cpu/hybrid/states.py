"""Number of slots for the recurrent states of an engine.

A running request has one state, whatever its length, and so has each cached prefix.
"""

from __future__ import annotations

from typing import Any

RUNNING = 512  # default number of concurrent requests
SLOTS_PER_REQUEST = 4  # SGLang counts three for a running request and its cached prefix, four with DCP
MAX_BYTES = 1 << 30


def state_bytes(config: Any) -> int:
    """Return the bytes of one request's float32 states in all layers of a text config; 0 if it has no linear attention."""
    layers = len(getattr(config, "linear_layer_ids", ()))
    if not layers:
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    convolution = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return 4 * layers * (convolution + values * config.linear_key_head_dim)


def slots(config: Any, max_running_requests: int | None) -> int | None:
    """Return the value of ``max_mamba_cache_size`` for a text config; None to leave it to SGLang.

    The result is None if the states would take more than ``MAX_BYTES``, or if the model has none. SGLang would fill a share of
    the memory with states, which suits large models; for a small one, that takes seconds and gigabytes.
    """
    num_slots = SLOTS_PER_REQUEST * (max_running_requests or RUNNING)
    size = state_bytes(config)
    return num_slots if 0 < num_slots * size <= MAX_BYTES else None
