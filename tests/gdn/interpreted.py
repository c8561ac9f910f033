"""Run fla's Triton kernels on a CPU by Triton's interpreter: ``python -m tests.gdn.interpreted FOLDER`` prints JSON.

The kernels run in one process, and on two ranks that share a stream through fla's context parallelism.

They run in a separate process, because transformers' Qwen3-Next does not run on a CPU once fla is importable. FOLDER
contains fla-core and einops, and may contain a package ``flash_qla`` that must not be called.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, cast

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

from slime_like.util.imports import heavy_imports

with heavy_imports():
    import torch
    from triton.language.core import is_builtin

    from slime_like.train.megatron.platform import host
    from slime_like_plugins.qwen_gdn.fla import FLASH_QLA_SWITCH, FlaGDN, active_dispatch, dispatched_functions
    from tests.gdn.recurrence import CaseShape, conv_errors, errors, make_case, make_conv, of_backend, oracle
    from tests.train.ranks import RankWorld, fork_ranks
    from tests.train.state_passing import PackedCase, join_group, range_errors

RULES: dict[str, tuple[CaseShape, float, torch.dtype]] = {
    "packed, padded, grouped": (CaseShape((70, 1, 5), heads=1, groups=2, key=16, value=16, tail=3), 0.3, torch.float32),
    "empty sequences": (CaseShape((0, 3, 0), heads=1, key=16, value=16), 0.3, torch.float32),
    "no token": (CaseShape((0, 0), heads=1, key=16, value=16, tail=2), 0.3, torch.float32),
    "strong decay, real heads": (CaseShape((66,), heads=1, key=128, value=128), 16.0, torch.float32),
    "half precision": (CaseShape((70, 2), heads=1, key=16, value=32, tail=1, state=False), 0.3, torch.float16),
}
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "packed, padded": ((70, 3), 2, False),
    "short sequences after a halo": ((2, 1, 0, 70, 5), 1, True),
}

STREAMS = {
    "two chunks, a sequence before and after": PackedCase((5, 150, 6), 4.0),
    "long memory": PackedCase((60,), 0.01),
    "ranges shorter than the convolution's reach": PackedCase((3,), 1.0),
}


class _Index(int):
    """Loop variable with the method ``to``, which fla's kernels call and the interpreter's int lacks."""

    def to(self, *_: object) -> int:
        return int(self)


def _range(*bounds: Any) -> Iterator[_Index]:
    return (_Index(i) for i in builtins.range(*(int(b) for b in bounds)))


def _first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run with the first config instead of autotuning, which needs a GPU driver."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    kernel_config = self.prune_configs(kwargs)[0]
    meta = {name: value for name, value in kernel_config.all_kwargs().items() if name in self.fn.arg_names}
    self.nargs = None
    return self.fn.run(*args, **kwargs, **meta)


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    """Patch the functions of ``package`` that are Triton's own, as the interpreter's function of this name does."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    for name in _builtin_names(package):
        if is_builtin(function := getattr(package, name)):  # not yet patched
            interpreter._patch_attr(package, name, function, builder, scope)


@cache
def _builtin_names(package: Any) -> list[str]:
    """Return the names of Triton's own functions. The first call for ``package`` comes before they are patched."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def interpret() -> None:
    """Patch Triton's interpreter, which lacks autotuning and ``to`` of loop variables, and fla, which refuses a CPU.

    Each of these patches can be removed once the kernels run without it. A further one saves a quarter of the time: the interpreter
    inspects ``triton.language`` at each call of a device function.
    """
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    assert hasattr(autotuner, "run") and hasattr(autotuner, "prune_configs")
    autotuner.run = _first_config
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    assert hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr")
    interpreter._patch_builtin = _patch_builtin
    states: Any = importlib.import_module("fla.ops.common.chunk_delta_h")
    states.range = _range
    for name in ("chunk_delta_h", "chunk_fwd", "chunk_bwd", "chunk_merge"):
        module: Any = importlib.import_module(f"fla.ops.cp.{name}")
        assert hasattr(module, "_check_cp_device")
        module._check_cp_device = lambda device: None  # would refuse a CPU


def on_ranks(world: RankWorld) -> dict[str, Any]:
    """Return the errors of each stream, the sizes of fla's gathers, and the errors without its backward gather."""
    join_group(world)
    backend, shared = FlaGDN(), cast("Any", importlib.import_module("fla.ops.cp.chunk_delta_h"))
    gather, calls = shared.all_gather_into_tensor, list[int]()

    def counting_exchange(states: torch.Tensor, *, group: Any) -> Any:
        calls.append(states.numel())
        flat = states.new_empty(
            world.size * len(states), *states.shape[1:]
        )  # gloo supports no more dimensions, NCCL does
        return gather(states, flat, group)[0].unflatten(0, (world.size, -1)), None

    def without_backward(states: torch.Tensor, *, group: Any) -> Any:
        gathered, handle = counting_exchange(states, group=group)
        return (gathered, handle) if len(calls) % 2 else (torch.zeros_like(gathered), handle)

    shared.all_gather_into_tensor = counting_exchange
    results = {name: range_errors(world, case, backend, torch.float32) for name, case in STREAMS.items()}
    sizes = list(calls)
    shared.all_gather_into_tensor = without_backward
    fault = range_errors(world, STREAMS["long memory"], backend, torch.float32)
    return {"errors": results, "numbers": sizes, "fault": fault}


def main() -> dict[str, Any]:
    """Return the errors of each part against the recurrence, and the kernels that ran."""
    with heavy_imports():  # before the fork, so that the ranks need not import them
        interpret()
        host.install("cpu")
        for name in ("fla.ops.gated_delta_rule", "slime_like_plugins.qwen_gdn.state_passing"):
            importlib.import_module(name)
    results: dict[str, Any] = {"ranks": fork_ranks(on_ranks, 2)}
    results["dispatch before"] = active_dispatch("gated_delta_rule")
    backend = FlaGDN()
    results |= {"dispatch after": active_dispatch("gated_delta_rule"), "switch": os.environ[FLASH_QLA_SWITCH]}
    results["rule"] = {}
    for name, (shape, decay, dtype) in RULES.items():
        case = make_case(shape, decay=decay).to(dtype)
        results["rule"][name] = errors(of_backend(backend, case), oracle(case))
    results["conv"] = {}
    for name, (lengths, tail, halo) in CONVOLUTIONS.items():
        results["conv"][name] = conv_errors(backend, make_conv(lengths, 4, tail=tail, halo=halo), torch.float32)
    results |= {"kernels": backend.kernels(), "dispatched": dispatched_functions()}
    return results


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main())}\n")
