"""Benchmark of decode attention over latents on this CPU: one layer of an engine, in torch and in C, on one thread.

python benchmarks/latent_decode.py [--batch 1 8 32] [--context 512 4096] [--latent 512] [--rounds 9]

A token has one key for all heads: its latent and its rotated key. They have 512 + 64 numbers by default, as in
DeepSeek-V2, V3 and Kimi K2.
Both arms take turns; figures are medians, in CPU milliseconds of the thread, so that other processes have little influence.
The requests' slots are scattered over the KV pool.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like_plugins.sglang_cpu.build import BuildError, build  # noqa: E402
from slime_like_plugins.sglang_cpu.kernels import CKernels  # noqa: E402

ROTATED = 64
DTYPES = (torch.float32, torch.bfloat16)


def main(argv: Sequence[str]) -> int:
    """Print a table. Raises ``SystemExit`` if there are no C kernels on this machine, or if the outputs of arms disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=at_least(1), nargs="+", default=[512, 4096])
    parser.add_argument("--latent", type=at_least(1), nargs="+", default=[512], help="numbers of a latent")
    parser.add_argument("--heads", type=at_least(1), default=16)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    options = parser.parse_args(argv)
    try:
        c = CKernels(build().path)
    except (BuildError, OSError) as error:
        raise SystemExit(f"no C kernels on this machine: {error}") from error
    lines = [
        machine(os.getloadavg()[0]),
        "",
        f"{options.heads} heads, {ROTATED} rotated numbers, CPU ms of a layer:",
        "",
    ]
    lines += ["| dtype | latent | batch | context | torch | C | torch / C |", "|---|---|---|---|---|---|---|"]
    torch.set_num_threads(1)
    shapes = list(product(options.batch, options.context, [options.heads], options.latent))
    for dtype, shape in product(DTYPES, shapes):
        batch, context, _, latent = shape
        in_torch, in_c = measure(c, shape, dtype, options.rounds)
        cells = [
            str(dtype).removeprefix("torch."),
            latent,
            batch,
            context,
            *map("{:.2f}".format, (in_torch, in_c, in_torch / in_c)),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    sys.stdout.write(visible("\n".join(lines) + "\n"))
    return 0


@torch.no_grad()
def measure(c: CKernels, shape: tuple[int, int, int, int], dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Return the median CPU milliseconds of torch and of C. Raises ``SystemExit`` if their outputs disagree."""
    arms = make_arms(c, shape, dtype)
    in_torch, in_c = (arm() for arm in arms)
    if not torch.allclose(in_torch.float(), in_c.float(), atol=2e-2 if dtype is torch.bfloat16 else 1e-4):
        raise SystemExit(f"C and torch disagree: {float((in_torch.float() - in_c.float()).abs().max()):.1e}")
    times = [[cpu_ms(arm) for arm in arms] for _ in range(rounds)]
    return median(row[0] for row in times), median(row[1] for row in times)


def make_arms(c: CKernels, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Callable[[], Tensor], ...]:
    """Return functions that compute the attention of a batch, in torch and in C."""
    from slime_like_plugins.sglang_cpu.latent_attention import LatentAttentionBackend

    batch, context, heads, latent = shape
    torch.manual_seed(0)
    slots = batch * context
    keys = torch.randn(slots, 1, latent + ROTATED).to(dtype)
    pools = {
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.randperm(slots).int().view(batch, context)),
        "token_to_kv_pool": SimpleNamespace(get_key_buffer=lambda _: keys),
    }
    lengths = torch.full((batch,), context)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True)
    forward: Any = SimpleNamespace(forward_mode=mode, batch_size=batch, seq_lens=lengths, seq_lens_cpu=lengths)
    forward.req_pool_indices = torch.arange(batch)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, qk_head_dim=latent + ROTATED, v_head_dim=latent)
    layer.scaling = (128 + ROTATED) ** -0.5
    queries = torch.randn(batch, heads * (latent + ROTATED)).to(dtype)

    def arm(kernels: CKernels | None) -> Callable[[], Tensor]:
        backend = LatentAttentionBackend(SimpleNamespace(**pools), kernels)
        backend.init_forward_metadata(forward)
        return lambda: backend.forward_extend(queries, queries, queries, layer, forward, save_kv_cache=False)

    return arm(None), arm(c)


def cpu_ms(function: Callable[[], object]) -> float:
    """Return the CPU milliseconds of one call, on this thread."""
    start = time.thread_time()
    function()
    return 1e3 * (time.thread_time() - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
