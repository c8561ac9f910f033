"""Compile the kernels of a Triton cache for another GPU: ``python -m tests.phantom.compile_ir FOLDER 100 NAME...``.

Prints the sizes as JSON. Starts from Triton's IR in the cache, so that neither a phantom GPU nor the kernels' packages are needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget


def compile_kernels(folder: Path, capability: int, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the machine code of each kernel."""
    target: Any = GPUTarget("cuda", capability, 32)
    out: dict[str, int] = {}
    for file in (next(folder.glob(f"*/{name}.ttir")) for name in names):
        compiled: Any = triton.compile(str(file), target=target)
        assert compiled.metadata.target.arch == capability
        out[file.stem] = len(compiled.asm["cubin"])
    return out


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_kernels(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
