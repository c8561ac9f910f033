"""fla's own Triton kernels on a CPU, through Triton's interpreter: ``python -m tests.gdn.interpreted FOLDER`` prints JSON.

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
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, sys.argv[1])

import torch

from slime_like_plugins.qwen_gdn.fla import FLASH_QLA_SWITCH, FlaGDN, active_dispatch, handed_over
from tests.gdn.recurrence import Shape, conv_errors, errors, make_case, make_conv, of_backend, oracle

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


def main() -> dict[str, Any]:
    """Errors against the recurrence, part by part, and which kernels ran."""
    interpret()
    importlib.import_module("fla.ops.gated_delta_rule")
    found: dict[str, Any] = {"dispatch before": active_dispatch("gated_delta_rule")}
    backend = FlaGDN()
    found |= {"dispatch after": active_dispatch("gated_delta_rule"), "switch": os.environ[FLASH_QLA_SWITCH]}
    found["rule"] = {}
    for name, (shape, decay, dtype) in RULES.items():
        case = make_case(shape, decay=decay).to(dtype)
        found["rule"][name] = errors(of_backend(backend, case), oracle(case))
    found["conv"] = {}
    for name, (lengths, tail, halo) in CONVOLUTIONS.items():
        found["conv"][name] = conv_errors(backend, make_conv(lengths, 4, tail=tail, halo=halo), torch.float32)
    found |= {"kernels": backend.kernels(), "handed over": handed_over()}
    return found


if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(main())}\n")
