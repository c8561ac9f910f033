"""How many delta rule states an engine keeps: a request has one however long it is, a cached prefix one more."""

from __future__ import annotations

from typing import Any

RUNNING = 512  # requests decoded together, where nothing says how many
SLOTS_PER_REQUEST = 4  # SGLang counts three for one that runs beside its cached prefix
MOST_BYTES = 1 << 30


def state_bytes(config: Any) -> int:
    """Bytes of one request's states in float32 over all layers, of a text config; 0 where no layer is linear attention."""
    layers = len(getattr(config, "linear_layer_ids", ()))
    if not layers:
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    convolution = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return 4 * layers * (convolution + values * config.linear_key_head_dim)


def slots(config: Any, max_running_requests: int | None) -> int | None:
    """``max_mamba_cache_size``; ``None`` leaves it to SGLang, which fills its share of the memory.

    SGLang's own choice takes seconds to allocate and gigabytes for a small model; of a large one it is the right one.
    """
    wanted = SLOTS_PER_REQUEST * (max_running_requests or RUNNING)
    size = state_bytes(config)
    return wanted if 0 < wanted * size <= MOST_BYTES else None
