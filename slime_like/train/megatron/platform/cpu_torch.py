"""Replacement for ``torch`` in megatron-core on a machine without a GPU: CUDA functions act on the CPU.

``torch.cuda.current_device()`` returns the CPU, streams and events do nothing, and tensor factories such as ``torch.empty``
create a tensor on the CPU if called with ``device="cuda"``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = [
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "rand",
    "randn",
    "randint",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "eye",
]


class _NoOp:
    """A stream, event or device context that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., _NoOp]:
        return lambda *args, **kwargs: _NoOp()

    def __enter__(self) -> _NoOp:
        return self

    def __exit__(self, *error: object) -> None: ...


def _no_op(*args: Any, **kwargs: Any) -> None: ...


class _CpuCuda(types.ModuleType):
    """``torch.cuda`` implemented on the CPU."""

    Stream = Event = stream = device = _NoOp
    current_stream = default_stream = staticmethod(_NoOp)
    synchronize = empty_cache = set_device = set_stream = staticmethod(_no_op)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    @staticmethod
    def current_device() -> torch.device:
        return CPU

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class CpuTorch(types.ModuleType):
    """Module that forwards to ``torch``, except ``torch.cuda`` and tensor factories."""

    cuda = _CpuCuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        self.__dict__[name] = value  # later lookups skip __getattr__
        return value


def make_cpu_torch() -> CpuTorch:
    """Return a replacement for ``torch``."""
    module = CpuTorch("torch")
    for name in _FACTORIES:
        setattr(module, name, _on_cpu(getattr(torch, name)))
    return module
