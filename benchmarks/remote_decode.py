"""Decode steps with half of the experts in a worker, relative to all experts in one process, for several sizes of experts.

python benchmarks/remote_decode.py [--rounds 20]

Layers and steps are those of `remote_experts.py`, which also has larger experts; requests travel in shared memory. Times are those of
the fastest round, in which the machine's other work disturbs least: a worker needs a second core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.remote_experts import (  # noqa: E402
    DECODE_BATCH,
    DECODE_STEPS,
    EXPERTS,
    PROMPT,
    LayerSize,
    Local,
    Remote,
    decode,
    make_layers,
    worker,
)
from slime_like.config.schema.remote_experts import RemoteOptions  # noqa: E402
from slime_like.printable import visible  # noqa: E402

SIZES = [LayerSize(4, hidden, hidden // 2) for hidden in (128, 256, 512)]


def measure(size: LayerSize, rounds: int) -> tuple[float, float]:
    """Return tokens/s with all experts in one process, and tokens/s with a worker."""
    layers = make_layers(size)
    x = torch.randn((PROMPT, size.hidden), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address, key_file = stack.enter_context(worker(Path(folder), 1.0, "0"))
        options = RemoteOptions(
            count=EXPERTS // 2, transport="shared", workers=(address,), key_file=key_file, deadline_s=120.0
        )
        remote = Remote(layers, options)
        stack.callback(remote.experts.close)
        runs: tuple[Local | Remote, ...] = (Local(layers), remote)
        fastest = [float("inf"), float("inf")]
        for _ in range(rounds):
            for index, run in enumerate(runs):
                start = time.perf_counter()
                decode(run, layers, x)
                fastest[index] = min(fastest[index], time.perf_counter() - start)
    local_s, remote_s = fastest
    return DECODE_STEPS * DECODE_BATCH / local_s, DECODE_STEPS * DECODE_BATCH / remote_s


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(visible(f"load average {os.getloadavg()[0]:.1f} before the run\n"))
    print(visible("| experts | all local, tokens/s | half in a worker, tokens/s | relative |\n|---|--:|--:|--:|"))
    for size in SIZES:
        local, remote = measure(size, options.rounds)
        line = f"| {size.intermediate} x {size.hidden} | {local:,.0f} | {remote:,.0f} | {remote / local:.2f} |"
        print(visible(line), flush=True)


if __name__ == "__main__":
    main()
