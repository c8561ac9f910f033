"""Benchmark of FlowMLA's gathers on this CPU: two ranks, each a process, multiply inputs by gathered and by full weights.

    python benchmarks/flow_prefetch.py

It reports the time of a layer's products and of its gather alone, the share of the gathers' time that the products hide, and the
timeline of a forward. Gathers and products share the cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

import torch  # noqa: E402  (after the lines above, as the imports below)
import torch.distributed as dist  # noqa: E402

from benchmarks.options import at_least  # noqa: E402
from benchmarks.processes import join_ranks  # noqa: E402
from benchmarks.run import machine  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like_plugins.flow_mla.gather import Gather, GroupGather, Pending, create_groups  # noqa: E402
from slime_like_plugins.flow_mla.host_parts import HostParts  # noqa: E402
from slime_like_plugins.flow_mla.layout import Matrix, layer_layout  # noqa: E402
from slime_like_plugins.flow_mla.pipeline import GatherPipeline  # noqa: E402
from slime_like_plugins.flow_mla.pull import GroupExchange, PullGather  # noqa: E402

RANKS, SLOTS, LAYERS = 2, 2, 8
SHAPE = (1024, 1024)  # shape of a layer's sharded matrix
OTHER = 4  # products with weights that are not sharded, per layer
BATCHES = (1, 16, 128)


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Medians of one transport and batch size on a rank, in seconds, and the timeline of its last forward."""

    transport: str
    batch: int
    layer_s: float  # products of a layer with full weights
    gather_s: float  # gather of a layer, alone
    wait_s: float  # wait of a layer for its gather, within a forward
    forward_s: float  # forward with gathers
    full_s: float  # forward with full weights
    ratio: float  # forward_s / full_s in the same round
    timeline: tuple[str, ...]

    @property
    def hidden(self) -> float:
        """Share of the gathers' time that the forward does not wait for."""
        return max(0.0, 1 - self.wait_s / self.gather_s)


class TracedGather:
    """Wrapper of a ``Gather`` that records in ``events`` when the gather of a layer begins."""

    def __init__(self, gather: Gather, events: list[tuple[float, str]]) -> None:
        self._gather, self._events = gather, events
        self.allocate, self.share, self.meet = gather.allocate, gather.share, gather.meet

    def start(self, slot: int, layer: int, buffer: torch.Tensor) -> Pending:
        self._events.append((time.perf_counter(), f"gather into slot {slot} begins"))
        return self._gather.start(slot, layer, buffer)


def seconds(work: Callable[[], object]) -> float:
    """Return the duration of ``work`` on this rank. Collective: all ranks begin at the same time."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(transport: str, batch: int, rounds: int, gather: Gather, rank: int) -> PrefetchResult:
    """Measure one transport and batch size, and return this rank's result. Collective."""
    layout = layer_layout([Matrix(SHAPE, (SHAPE[1], 1), torch.float32)], RANKS)
    generator = torch.Generator().manual_seed(rank)
    parts = [gather.allocate(layout.part_bytes, torch.device("cpu")) for _ in range(LAYERS)]
    for part in parts:
        part.view(torch.float32).copy_(torch.randn(layout.part_bytes // 4, generator=generator))
    gather.share(parts)
    events: list[tuple[float, str]] = []
    pipeline = GatherPipeline([layout] * LAYERS, SLOTS, TracedGather(gather, events))
    full_weight, other_weights = torch.randn(SHAPE), [torch.randn(SHAPE) for _ in range(OTHER)]
    x, waits = torch.randn(batch, SHAPE[1]), []

    def products(weight: torch.Tensor) -> None:
        for matrix in (weight, *other_weights):
            torch.mm(x, matrix)

    def forward() -> None:
        pipeline.begin()
        for layer in range(LAYERS):
            start = time.perf_counter()
            pipeline.wait(layer)
            ready_at = time.perf_counter()
            waits.append(ready_at - start)
            products(layout.view(pipeline.slot(layer).buffer, 0))
            end = time.perf_counter()
            events.extend(
                ((start, f"layer {layer} waits"), (ready_at, f"layer {layer} runs"), (end, f"layer {layer} ends"))
            )
            pipeline.advance(layer)

    def alone() -> None:
        pipeline.drain()
        pipeline.fetch(0)

    gather_s = statistics.median(seconds(alone) for _ in range(rounds))
    forward()
    waits.clear()
    forwards: list[float] = []
    full_times: list[float] = []
    for _ in range(rounds):  # alternating, so that a busy machine slows both
        full_times.append(seconds(lambda: [products(full_weight) for _ in range(LAYERS)]))
        events.clear()
        forwards.append(seconds(forward))
    first = min(moment for moment, _ in events)
    timeline = tuple(f"{1e3 * (moment - first):7.2f} ms  {text}" for moment, text in sorted(events))
    pipeline.drain()
    wait_s = statistics.median(sum(waits[i : i + LAYERS]) / LAYERS for i in range(0, len(waits), LAYERS))
    full_s = statistics.median(full_times)
    ratio = statistics.median(gathered / plain for gathered, plain in zip(forwards, full_times, strict=True))
    return PrefetchResult(
        transport, batch, full_s / LAYERS, gather_s, wait_s, statistics.median(forwards), full_s, ratio, timeline
    )


def run_rank(rank: int, store: str, rounds: int, results: Any) -> None:
    """Measure on one rank, with one thread; rank 0 puts its measurements into the queue ``results``.

    Call it on ``RANKS`` ranks, each in a process of its own: it creates and destroys the process groups.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = create_groups([range(RANKS)], SLOTS, "gloo")
    gathers: dict[str, Gather] = {
        "collective": GroupGather(groups),
        "p2p": PullGather(rank, RANKS, GroupExchange(groups[0]), HostParts(SLOTS)),
    }
    timings = [measure(name, batch, rounds, gather, rank) for name, gather in gathers.items() for batch in BATCHES]
    if rank == 0:
        results.put(timings)
    dist.barrier()
    dist.destroy_process_group()


def table(results: list[PrefetchResult]) -> list[str]:
    """Return the Markdown table."""
    lines = [
        "| transport | tokens | layer, ms | gather alone, ms | wait per layer, ms | hidden | forward with full weights, ms | with "
        "gathers, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.transport} | {r.batch} | {1e3 * r.layer_s:.2f} | {1e3 * r.gather_s:.2f} | {1e3 * r.wait_s:.2f} | {r.hidden:.0%} "
            f"| {1e3 * r.full_s:.1f} | {1e3 * r.forward_s:.1f} ({r.ratio:.2f}) |"
        )
    return lines


def main(argv: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(2), default=30)
    options = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(visible(machine(os.getloadavg()[0])))
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", options.rounds, results)
        ranks = torch.multiprocessing.start_processes(run_rank, arguments, RANKS, join=False)
        join_ranks(ranks)
        timings: list[PrefetchResult] = results.get()  # rank 0 has put them: they fit into the pipe of the queue
    print(visible("\n".join(table(timings))))
    for result in (timings[len(BATCHES) - 1], timings[-1]):
        print(visible("\n".join(["", f"{result.transport}, {result.batch} tokens:", "", *result.timeline])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
