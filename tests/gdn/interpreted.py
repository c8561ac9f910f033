"""fla's own Triton kernels on a CPU, through Triton's interpreter: ``python -m tests.gdn.interpreted FOLDER`` prints JSON.

Alone, and on two ranks that share a stream by fla's own context parallelism.

A process of its own: with fla importable transformers' Qwen3-Next no longer runs on a CPU. FOLDER holds fla-core and
einops and may hold a package ``flash_qla``, which is then not to be called.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, cast

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import torch

from slime_like.train.megatron.platform import host
from slime_like_plugins.qwen_gdn.fla import FLASH_QLA_SWITCH, FlaGDN, active_dispatch, handed_over
from tests.gdn.recurrence import Shape, conv_errors, errors, make_case, make_conv, of_backend, oracle
from tests.train.ranks import World, fork_ranks
from tests.train.state_passing import Case, meet, range_errors

RULES: dict[str, tuple[Shape, float, torch.dtype]] = {
    "packed, padded, grouped": (Shape((70, 1, 5), heads=1, groups=2, key=16, value=16, tail=3), 0.3, torch.float32),
    "empty sequences": (Shape((0, 3, 0), heads=1, key=16, value=16), 0.3, torch.float32),
    "no token": (Shape((0, 0), heads=1, key=16, value=16, tail=2), 0.3, torch.float32),
    "strong decay, real heads": (Shape((66,), heads=1, key=128, value=128), 16.0, torch.float32),
    "half precision": (Shape((70, 2), heads=1, key=16, value=32, tail=1, state=False), 0.3, torch.float16),
}
CONVOLUTIONS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "packed, padded": ((70, 3), 2, False),
    "short sequences after a halo": ((2, 1, 0, 70, 5), 1, True),
}

STREAMS = {
    "two chunks, a sequence before and after": Case((5, 150, 6), 4.0),
    "long memory": Case((60,), 0.01),
    "ranges shorter than the convolution's reach": Case((3,), 1.0),
}


class _Index(int):
    """A loop variable: kernels call ``to`` on it, which Triton compiles away and the interpreter's plain int lacks."""

    def to(self, *_: object) -> int:
        return int(self)


def _range(*bounds: Any) -> Iterator[_Index]:
    return (_Index(i) for i in builtins.range(*(int(b) for b in bounds)))


def _first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of a search by timing, which needs a GPU's driver."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    chosen = self.prune_configs(kwargs)[0]
    meta = {name: value for name, value in chosen.all_kwargs().items() if name in self.fn.arg_names}
    self.nargs = None
    return self.fn.run(*args, **kwargs, **meta)


def interpret() -> None:
    """Let fla's kernels run under Triton's interpreter. Goes when the interpreter can autotune and loop by itself."""
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    assert hasattr(autotuner, "run") and hasattr(autotuner, "prune_configs")
    autotuner.run = _first_config
    states: Any = importlib.import_module("fla.ops.common.chunk_delta_h")
    states.range = _range
    for name in ("chunk_delta_h", "chunk_fwd", "chunk_bwd", "chunk_merge"):
        module: Any = importlib.import_module(f"fla.ops.cp.{name}")
        assert hasattr(module, "_check_cp_device")
        module._check_cp_device = lambda device: None  # asks for a GPU


def on_ranks(world: World) -> dict[str, Any]:
    """Errors of each stream beside one rank, the collectives of fla's in one, and errors without those of backward."""
    meet(world)
    backend, shared = FlaGDN(), cast("Any", importlib.import_module("fla.ops.cp.chunk_delta_h"))
    gather, calls = shared.all_gather_into_tensor, list[int]()

    def counted(states: torch.Tensor, *, group: Any) -> Any:
        calls.append(states.numel())
        flat = states.new_empty(world.size * len(states), *states.shape[1:])  # gloo takes no more dimensions, NCCL does
        return gather(states, flat, group)[0].unflatten(0, (world.size, -1)), None

    def without_backward(states: torch.Tensor, *, group: Any) -> Any:
        everyone, handle = counted(states, group=group)
        return (everyone, handle) if len(calls) % 2 else (torch.zeros_like(everyone), handle)

    shared.all_gather_into_tensor = counted
    results = {name: range_errors(world, case, backend, torch.float32) for name, case in STREAMS.items()}
    numbers = list(calls)
    shared.all_gather_into_tensor = without_backward
    fault = range_errors(world, STREAMS["long memory"], backend, torch.float32)
    return {"errors": results, "numbers": numbers, "fault": fault}


def main() -> dict[str, Any]:
    """Errors against the recurrence, part by part, and which kernels ran."""
    interpret()
    host.install("cpu")
    for name in ("fla.ops.gated_delta_rule", "slime_like_plugins.qwen_gdn.state_passing"):
        importlib.import_module(name)  # for the ranks, too
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
    results |= {"kernels": backend.kernels(), "handed over": handed_over()}
    return results


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main())}\n")
