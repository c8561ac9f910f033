"""The engine's matrix products on this CPU: the C kernels and torch, by shape, on one thread.

python benchmarks/products.py [--rows 32 64] [--rounds 5] [--cold-mb 40]

Values are GFLOP/s of the fastest round, by the thread's CPU time, so that other processes have little influence. Torch's
products are those of an engine without C products: oneDNN with packed weights in bfloat16, `torch.mm` in float32. `cold`: the C
kernels with different weights in every call, `--cold-mb` in total, as in a decode step of a model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like_plugins.sglang_cpu.build import BuildError, build  # noqa: E402  (found by the line above)
from slime_like_plugins.sglang_cpu.kernels import CKernels  # noqa: E402
from slime_like_plugins.sglang_cpu.products import OneDnn  # noqa: E402

SHAPES = {  # outputs, inputs
    "tiny: qkv": (256, 128),
    "tiny: gate and up": (512, 128),
    "20m: qkv": (640, 384),
    "20m: gate and up": (3584, 384),
    "20m: down": (384, 1792),
}


def main(argv: list[str] | None = None) -> int:
    """Print a table. Raises ``SystemExit`` if there are no C products on this machine, or if C and torch disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--cold-mb", type=at_least(0), default=40)
    options = parser.parse_args(argv)
    try:
        c = CKernels(build().path)
    except (BuildError, OSError) as error:
        raise SystemExit(f"no C kernels on this machine: {error}") from error
    if not c.has_products:
        raise SystemExit("the C kernels have no products for this CPU: they are for AVX512-BF16 without AMX")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = ["| product | rows | dtype | C | C, cold | torch |", "|---|---|---|---|---|---|"]
    try:
        for name, (columns, depth) in SHAPES.items():
            for rows in options.rows:
                for dtype in (torch.bfloat16, torch.float32):
                    rates = measure(c, (rows, columns, depth), dtype, options.rounds, options.cold_mb << 20)
                    text = " | ".join(f"{rate:.0f}" for rate in rates)
                    lines.append(f"| {name} | {rows} | {str(dtype).removeprefix('torch.')} | {text} |")
    finally:
        torch.set_num_threads(threads)
    sys.stdout.write(visible("GFLOP/s on one thread:\n\n" + "\n".join(lines) + "\n"))
    return 0


@torch.no_grad()
def measure(
    c: CKernels, shape: tuple[int, int, int], dtype: torch.dtype, rounds: int, cold_bytes: int
) -> tuple[float, float, float]:
    """Return GFLOP/s of C, of C with cold weights, and of torch. Raises ``SystemExit`` if C and torch disagree."""
    rows, columns, depth = shape
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    packed, out = c.pack(weight), torch.empty(rows, columns, dtype=dtype)
    num_copies = max(2, -(-cold_bytes // (packed.numel() * packed.element_size())))
    copies = [packed.clone() for _ in range(num_copies)]
    torch_product = _torch_product(x, weight)
    if not torch.allclose(c.product(x, packed, None, out), torch_product(), rtol=2**-6, atol=2**-4):
        raise SystemExit(f"C and torch disagree on a product of {shape} in {dtype}")

    def cold() -> None:
        for copy in copies:
            c.product(x, copy, None, out)

    def hot() -> None:
        for _ in copies:
            c.product(x, packed, None, out)

    def run_torch() -> None:
        for _ in copies:
            torch_product()

    work = 2e-9 * rows * columns * depth * num_copies
    return work / fastest(hot, rounds), work / fastest(cold, rounds), work / fastest(run_torch, rounds)


def _torch_product(x: Tensor, weight: Tensor) -> Callable[[], Tensor]:
    library = OneDnn()
    if library.packs(weight):
        packed, no_bias = library.pack(weight), torch.empty(0)
        return lambda: library.product(x, packed, None, no_bias)
    return lambda: torch.mm(x, weight.t())


def fastest(work: Callable[[], None], rounds: int) -> float:
    """Return the CPU seconds of ``work`` on this thread in the fastest of ``rounds`` rounds, after one warm-up round."""
    work()
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        seconds.append(time.thread_time() - start)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
