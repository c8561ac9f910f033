"""Stand-in for sglang-kernel, and for the kernels that SGLang compiles, in an engine on a phantom GPU.

Like all kernels on a phantom GPU, they compute nothing: a call leaves the memory of its results as it is. Kernels of a
dense model that return their result return memory of its shape (``RESULTS``); the others return None.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from sglang.kernels.jit.utils.compile import loader

PACKAGES = ("sgl_kernel", "cutlass")


def like_input(x: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Return memory for the result of an operation on each row: ``out`` if given."""
    return torch.empty_like(x) if out is None else out


def attention(q: Any, k: Any, v: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """Return memory for the result of attention, the queries' rows with the values' size: ``out`` if given."""
    return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device) if out is None else out


RESULTS: dict[str, Callable[..., Any]] = {
    "rmsnorm": like_input,
    "flash_attn_with_kvcache": attention,
    "flash_attn_varlen_func": attention,
}


class Kernel:
    """Stand-in for a kernel, or for a table of constants that kernels use."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Compute nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


kernel = Kernel()


def find(name: str) -> Any:
    """Return the stand-in for the kernel ``name``. Raises AttributeError for names that begin with two underscores."""
    if name.startswith("__"):
        raise AttributeError(name)
    return RESULTS.get(name, kernel)


def weak_ref_tensor(tensor: Any) -> Any:
    """Return the tensor, not a weak reference to it."""
    return tensor


def __getattr__(name: str) -> Any:
    return find(name)


class KernelModule(ModuleType):
    """Module in which every name is a stand-in for a kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Any:
        return find(name)


class KernelFinder:
    """Finder of every module of ``PACKAGES``, whatever its name."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a module of ``PACKAGES``, and None for any other."""
        return importlib.machinery.ModuleSpec(name, KernelFinder) if name.partition(".")[0] in PACKAGES else None  # pyright: ignore[reportArgumentType]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module."""
        return KernelModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Execute nothing."""


sys.meta_path.append(KernelFinder)  # pyright: ignore[reportArgumentType]
loader.ninja.generate = lambda spec: ""
loader.cache.compute_build_key = lambda *args, **kwargs: "phantom"
loader._find_prebuilt = lambda **kwargs: "phantom"
loader._load = lambda library: KernelModule("phantom")
