"""Import-time adaptation of megatron-core: patches on every device, and a replacement for ``torch`` on a CPU.

Without a GPU the global ``torch`` of every ``megatron.core`` module is replaced by ``cpu_torch``. Other libraries use the
real ``torch``, in which ``Tensor.cuda`` returns the CPU tensor and optimizers do not import torch._dynamo
(``cpu_patches.without_dynamo``). Within the context ``building_optimizer``, ``Tensor.type`` returns CUDA types.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import logging
import re
import sys
import types
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch

from slime_like.train.megatron.platform import cpu_patches, patches
from slime_like.train.megatron.platform.cpu_torch import make_cpu_torch


class _Finder:
    """Import hook that runs a megatron module, then adapts it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.cpu_torch = make_cpu_torch() if device == "cpu" else None
        self.patches_of: dict[str, list[patches.Patch]] = {name: [patch] for name, patch in patches.table().items()}
        for name, patch in cpu_patches.PATCHES.items() if device == "cpu" else ():
            self.patches_of.setdefault(name, []).append(patch)
        self.patched: set[str] = set()  # names of modules

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """Return a spec whose loader adapts the module, None if missing or outside megatron.core (see ``sys.meta_path``)."""
        if not _is_core(name):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with (
                _without_import_warnings(),
                _without_wandb(),
                _without_compile() if self.cpu_torch else contextlib.nullcontext(),
            ):
                run(module)
            if self.cpu_torch and module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.cpu_torch
            for patch in self.patches_of.get(name, ()):
                patch(module)
                self.patched.add(name)

        loader.exec_module = exec_module
        return spec


def _is_core(name: str) -> bool:
    return name == "megatron.core" or name.startswith("megatron.core.")


@contextlib.contextmanager
def _without_import_warnings() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|apex|is experimental).*")
        yield


@contextlib.contextmanager
def _without_wandb() -> Generator[None]:
    """Keep megatron's timers from importing wandb.

    The import takes half a second per rank, and leaves folders in the temporary directory when a rank is killed.
    """
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["wandb"]


@contextlib.contextmanager
def _without_compile() -> Generator[None]:
    """Disable torch.compile, which megatron applies at import: inductor takes seconds and needs a C++ compiler."""

    def uncompiled(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda f: f

    stock, torch.compile = torch.compile, uncompiled  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.compile = stock


# Logger -> pattern of its messages to drop, which are about deliberate choices of slime_like. Other messages are logged.
_EXPECTED_MESSAGES = {
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    "megatron.core.rerun_state_machine": "erunStateMachine|Rerun State Machine",
    "megatron.core.dist_checkpointing.strategies.torch": "async save is deprecated",
}


def _filter_expected_messages() -> None:
    for name, pattern in _EXPECTED_MESSAGES.items():
        expected = re.compile(pattern)
        logging.getLogger(name).addFilter(lambda record, e=expected: e.search(record.getMessage()) is None)
    for category in (UserWarning, FutureWarning):  # deprecations within the pinned versions
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core|torch\.distributed")


_installed: _Finder | None = None


def install(device: str) -> None:
    """Adapt megatron-core to ``device`` (cpu or cuda). The first call must precede the first import of megatron-core.

    Later calls with the same ``device`` do nothing. Raises ``AssertionError`` if called too late or for another device.
    """
    global _installed
    if _installed is not None:
        assert _installed.device == device, f"megatron-core was adapted to {_installed.device}, not {device}"
        return
    imported = sorted(name for name in sys.modules if _is_core(name))
    assert not imported, f"{imported[0]} was imported before slime_like.train.megatron.platform.host.install()"
    _filter_expected_messages()
    _installed = _Finder(device)
    sys.meta_path.insert(0, _installed)  # pyright: ignore[reportArgumentType]
    if device == "cpu":
        cpu_patches.without_dynamo()
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyright: ignore[reportAttributeAccessIssue]


def verify() -> None:
    """Import each module that has a patch, and assert that every patch was applied."""
    assert _installed is not None, "slime_like.train.megatron.platform.host.install() has not run"
    for name in sorted(set(_installed.patches_of) - _installed.patched):
        importlib.import_module(name)
    unapplied = sorted(set(_installed.patches_of) - _installed.patched)
    assert not unapplied, (
        f"patches that were not applied: {unapplied}: megatron-core changed, review slime_like.train.megatron"
    )


@contextlib.contextmanager
def building_optimizer() -> Generator[None]:
    """Make ``Tensor.type`` return CUDA types on a CPU: megatron's optimizers group parameters by these types."""
    if _installed is None or _installed.cpu_torch is None:
        yield
        return
    stock = torch.Tensor.type

    def as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = stock(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    torch.Tensor.type = as_cuda  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.Tensor.type = stock
