"""Memory of a rank as on a GPU: a given size, less the weights of the model. SGLang sizes its caches by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime_like.config.schema.rank_memory import rank_memory
from slime_like.errors import ConfigError
from slime_like_plugins.sglang_cpu import NAME
from slime_like_plugins.sglang_hooks import HELD_PART, Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

_models: list[torch.nn.Module] = []
"""The model of this process, once it has been loaded."""


def limit() -> int | None:
    """Return the memory limit of a rank in bytes, or None if only the machine's memory limits it. Stops the engine on a bad setting."""
    try:
        return rank_memory()
    except ConfigError as error:
        raise SystemExit(f"slime_like plugin {NAME!r}: {error}") from error


def record_model(model: Any) -> None:
    """Count the weights of ``model`` from now on."""
    _models[:] = [model]


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's weights in memory. Weights that share memory are counted once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(model))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_bytes() -> int:
    """Replace ``get_free_cpu_memory``, of which SGLang gives each rank the share of a NUMA node."""
    from sglang.srt.utils import common

    size = limit()
    assert size is not None, "install requires a limit"
    used_bytes = sum(weight_bytes(model) for model in _models)
    return max(0, size - used_bytes) * len(common.get_cpu_ids_by_node())


def install() -> None:
    """Apply the hook in this process if the memory of a rank is limited."""
    if limit() is not None:
        install_hooks(NAME, (Hook("sglang.srt.utils.common.get_free_cpu_memory", "replace", free_bytes),))


def _tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers and other tensors of the modules, and this rank's parts of sharded weights."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, Tensor):
                yield tensor
                if (part := getattr(tensor, HELD_PART, None)) is not None:
                    yield part
