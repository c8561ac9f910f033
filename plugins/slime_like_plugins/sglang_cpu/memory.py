"""Free memory that a CPU rank reports to SGLang if its memory is limited: the limit minus the weights of the loaded model.

SGLang sizes its caches from this value, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime_like.config.schema.rank_memory import rank_memory
from slime_like.errors import ConfigError
from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_hooks import HELD_PART, Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

_models: list[torch.nn.Module] = []
"""The model of this process, once it has been loaded."""


def limit() -> int | None:
    """Return the memory limit of a rank in bytes; None if only the machine's memory limits it.

    Raises ``SystemExit`` if the setting is not a number of bytes above 0.
    """
    try:
        return rank_memory()
    except ConfigError as error:
        raise SystemExit(f"slime_like plugin {CPU!r}: {error}") from error


def record_model(model: Any) -> None:
    """Record the loaded ``model``; from then on, ``free_bytes`` subtracts its weights from the limit."""
    _models[:] = [model]


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the memory of a model's weights in bytes. Weights that share memory are counted once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(model))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_bytes() -> int:
    """Return a rank's free bytes times the number of NUMA nodes, because SGLang divides the result by that number.

    This function replaces ``get_free_cpu_memory``.
    """
    from sglang.srt.utils import common

    size = limit()
    assert size is not None, "install requires a limit"
    used_bytes = sum(weight_bytes(model) for model in _models)
    return max(0, size - used_bytes) * len(common.get_cpu_ids_by_node())


def install() -> None:
    """Replace SGLang's ``get_free_cpu_memory`` in this process if the memory of a rank is limited.

    Raises ``SystemExit`` if the limit is not a number of bytes above 0, or if the function was not replaced.
    """
    if limit() is not None:
        install_hooks(CPU, (Hook("sglang.srt.utils.common.get_free_cpu_memory", "replace", free_bytes),))


def _tensors(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, buffers and other tensor attributes of all modules, and this rank's parts of sharded weights."""
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(tensor, Tensor):
                yield tensor
                if (part := getattr(tensor, HELD_PART, None)) is not None:
                    yield part
