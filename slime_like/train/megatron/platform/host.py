"""Import-time adaptation of megatron-core: patches on every device, and a facade that replaces the GPU on a CPU host.

Without a GPU the global ``torch`` of every ``megatron.core`` module is replaced by a facade whose CUDA API runs on the
host: ``torch.cuda.current_device()`` is the CPU, streams and events do nothing, ``device="cuda"`` means the CPU. Other
libraries see the real ``torch``, unchanged except for ``Tensor.cuda``, which could only raise on a CPU.
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
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from slime_like.train.megatron.platform import patches

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


class _Nothing:
    """A stream, event or device context that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Cuda(types.ModuleType):
    """``torch.cuda`` implemented on the host."""

    Stream = Event = stream = device = _Nothing
    current_stream = default_stream = staticmethod(_Nothing)
    synchronize = empty_cache = set_device = set_stream = staticmethod(_nothing)
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


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = CPU
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


class _Torch(types.ModuleType):
    """``torch`` as megatron sees it on a host."""

    cuda = _Cuda("torch.cuda")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        self.__dict__[name] = value  # later look-ups skip __getattr__
        return value


def _facade() -> _Torch:
    facade = _Torch("torch")
    for name in _FACTORIES:
        setattr(facade, name, _on_host(getattr(torch, name)))
    return facade


# ---- touch-ups of modules that reach past the facade -----------------------------------------------------------------
def _rng(module: types.ModuleType) -> None:
    """RNG states are read through torch.cuda.random and set through CUDA generators."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    patches.replace(module, "_get_cuda_rng_state", get_state)
    patches.replace(module, "_set_cuda_rng_state", set_state)
    logging.getLogger(module.__name__).addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _clip(module: types.ModuleType) -> None:
    """Clipping asserts that gradients are of type torch.cuda.FloatTensor."""

    def clip(parameters: Any, max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
        coefficient = max_norm / (total_norm + 1.0e-6)
        all_grads = [getattr(p, "decoupled_grad", None) if use_decoupled_grad else p.grad for p in parameters]
        grads = [grad for grad in all_grads if grad is not None]
        if coefficient < 1.0 and grads:
            torch._foreach_mul_(grads, coefficient)  # pyright: ignore[reportPrivateUsage]  no public function multiplies a list at once

    patches.replace(module, "clip_grad_by_total_norm_fp32", clip)


def _split_sizes(module: types.ModuleType) -> None:
    """Upstream converts split sizes of the expert all-to-all to numpy only when it copies them from a GPU."""
    stock: Callable[..., Any] = module.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        on_host = stock(tensor, as_numpy, record_stream)
        return on_host.numpy() if as_numpy and isinstance(on_host, torch.Tensor) else on_host

    patches.replace(module, "maybe_move_tensor_to_cpu", moved)


def _groups_of_one(module: types.ModuleType) -> None:
    """With one replica the distributed optimizer scatters and gathers buffers onto themselves; gloo copies each twice.

    Remove when megatron-core skips such exchanges.
    """
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        patches.replace(module, name, _unless_alone(getattr(module, name)))


def _unless_alone(exchange: Callable[..., Any]) -> Callable[..., Any]:
    def unless_alone(output: torch.Tensor, source: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        same = output.data_ptr() == source.data_ptr() and output.numel() == source.numel()
        if same and group is not None and group.size() == 1:
            return None
        return exchange(output, source, *args, group=group, **kwargs)

    return unless_alone


_HOST: dict[str, patches.Patch] = {
    "megatron.core.distributed.param_and_grad_buffer": _groups_of_one,
    "megatron.core.transformer.moe.moe_utils": _split_sizes,
    "megatron.core.tensor_parallel.random": _rng,
    "megatron.core.optimizer.clip_grads": _clip,
}


class _Finder:
    """Import hook: runs a megatron module as usual, then adapts it."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.facade = _facade() if device == "cpu" else None
        self.todo: dict[str, list[patches.Patch]] = {name: [patch] for name, patch in patches.table().items()}
        for name, patch in _HOST.items() if device == "cpu" else ():
            self.todo.setdefault(name, []).append(patch)
        self.done: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """``sys.meta_path`` protocol."""
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with _quiet(), _without_wandb(), _uncompiled() if self.facade else contextlib.nullcontext():
                run(module)
            if self.facade and module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.facade
            for patch in self.todo.get(name, ()):
                patch(module)
                self.done.add(name)

        loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|apex|is experimental).*")
        yield


@contextlib.contextmanager
def _without_wandb() -> Generator[None]:
    """Keep megatron's timers from importing wandb: it costs half a second per rank and leaves folders in the temporary
    directory when a rank is killed."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["wandb"]


@contextlib.contextmanager
def _uncompiled() -> Generator[None]:
    """Disable torch.compile, which megatron applies at import: it costs seconds of inductor and needs a C++ compiler."""

    def keep(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda f: f

    stock, torch.compile = torch.compile, keep  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.compile = stock


# Messages about deliberate choices; all others of these loggers pass.
_EXPECTED = {
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    "megatron.core.rerun_state_machine": "erunStateMachine|Rerun State Machine",
    "megatron.core.dist_checkpointing.strategies.torch": "async save is deprecated",
}


def _silence_expected() -> None:
    for name, pattern in _EXPECTED.items():
        expected = re.compile(pattern)
        logging.getLogger(name).addFilter(lambda record, e=expected: e.search(record.getMessage()) is None)
    for category in (UserWarning, FutureWarning):  # deprecations inside the pinned versions
        warnings.filterwarnings("ignore", category=category, module=r"megatron\.core|torch\.distributed")


_installed: _Finder | None = None


def install(device: str) -> None:
    """Adapt megatron-core to ``device`` (cpu or cuda). Must run before the first megatron import of the process."""
    global _installed
    if _installed is not None:
        assert _installed.device == device, f"megatron-core was adapted to {_installed.device}, not {device}"
        return
    early = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    assert not early, f"{early[0]} was imported before slime_like.train.megatron.platform.host.install()"
    _silence_expected()
    _installed = _Finder(device)
    sys.meta_path.insert(0, _installed)  # pyright: ignore[reportArgumentType]
    if device == "cpu":
        torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyright: ignore[reportAttributeAccessIssue]


def verify() -> None:
    """Import every patched module that is not imported yet, so that a patch without a module is an error."""
    assert _installed is not None, "slime_like.train.megatron.platform.host.install() has not run"
    for name in sorted(set(_installed.todo) - _installed.done):
        importlib.import_module(name)
    missed = sorted(set(_installed.todo) - _installed.done)
    assert not missed, f"patches without effect: {missed}: megatron-core changed, review slime_like.train.megatron"


@contextlib.contextmanager
def building_optimizer() -> Generator[None]:
    """Make ``Tensor.type`` report CUDA types on a host: megatron's optimizers group parameters by them."""
    if _installed is None or _installed.facade is None:
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
