"""Speed of decode steps with half of the experts in a worker, relative to all experts in one process, for several sizes.

python benchmarks/remote_decode.py [--rounds 20] [--real-time]

Layers and steps are those of `remote_experts.py`, which also measures larger experts; requests travel in shared memory. Two
arms compute all experts in one process: one by SGLang's function, as in an engine on a CPU without remote experts, and
one by the plugin's function, which the third arm uses for each half. Times are those of the fastest round, which other
work on the machine disturbs least. The third arm needs a second core, for the worker.
With `--real-time` (needs root) this process and the worker have priority over other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import psutil
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
    LocalSGLang,
    Remote,
    decode,
    make_layers,
    worker,
)
from slime_like.config.schema.remote_experts import RemoteOptions  # noqa: E402
from slime_like.printable import visible  # noqa: E402

SIZES = [LayerSize(4, hidden, hidden // 2) for hidden in (128, 256, 512)]


@contextlib.contextmanager
def undisturbed(is_real_time: bool) -> Generator[None]:
    """Give this process and its children real-time priority within the block, if ``is_real_time``."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)] if is_real_time else []
    threads = [thread.id for process in processes for thread in process.threads()]
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def measure(size: LayerSize, rounds: int, is_real_time: bool) -> list[float]:
    """Return three rates in tokens/s: of SGLang and of the plugin with all experts in one process, and with half in a worker."""
    layers = make_layers(size)
    x = torch.randn((PROMPT, size.hidden), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address, key_file = stack.enter_context(worker(Path(folder), 1.0, "0"))
        options = RemoteOptions(
            count=EXPERTS // 2, transport="shared", workers=(address,), key_file=key_file, deadline_s=120.0
        )
        remote = Remote(layers, options)
        stack.callback(remote.experts.close)
        runs: tuple[Local | Remote, ...] = (LocalSGLang(layers), Local(layers), remote)
        fastest = [float("inf")] * len(runs)
        stack.enter_context(undisturbed(is_real_time))
        for _ in range(rounds):
            for index, run in enumerate(runs):
                start = time.perf_counter()
                decode(run, layers, x)
                fastest[index] = min(fastest[index], time.perf_counter() - start)
    return [DECODE_STEPS * DECODE_BATCH / seconds for seconds in fastest]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    parser.add_argument("--real-time", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(visible(f"load average {os.getloadavg()[0]:.1f} before the run\n"))
    titles = (
        "experts",
        "SGLang, tokens/s",
        "plugin, all local",
        "half in a worker",
        "relative to SGLang",
        "to the plugin",
    )
    print(visible(f"| {' | '.join(titles)} |\n|---|--:|--:|--:|--:|--:|"))
    for size in SIZES:
        with torch.inference_mode():
            engine, local, remote = measure(size, options.rounds, options.real_time)
        line = f"| {size.intermediate} x {size.hidden} | {engine:,.0f} | {local:,.0f} | {remote:,.0f} |"
        print(visible(f"{line} {remote / engine:.2f} | {remote / local:.2f} |"), flush=True)


if __name__ == "__main__":
    main()
