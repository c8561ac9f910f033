"""Cost of the wrapper around collectives, and a simulation of slow memory queries.

python benchmarks/guard.py cost        each op raw and wrapped, without communication (torch's fake backend), in us
python benchmarks/guard.py simulate    steps of a simulated trainer under every preset, with queries of 8 ms; the clock
                                       advances only with computation, ops, queries and cheap checks
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import FakeWork  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from benchmarks.options import at_least  # noqa: E402
from slime_like.cluster.plan.guard import guard_spec  # noqa: E402
from slime_like.config.load.loader import load_config  # noqa: E402
from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy  # noqa: E402
from slime_like.distributed.wrapper import install, op_wrappers  # noqa: E402
from slime_like.distributed.wrapper import wrapper as wrapper_module  # noqa: E402
from slime_like.printable import visible  # noqa: E402

CALLS, ROUNDS, STEPS = 50, 60, 10
CPU = torch.device("cpu")
# The simulated trainer: one step of a pipeline stage with tensor and sequence parallelism.
LAYERS, MICRO_BATCHES, COMPUTE_S, OP_S, QUERY_S, CHEAP_CHECK_S = 28, 8, 8.0, 100e-6, 0.008, 50e-6
PER_LAYER = {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
PER_MICRO_BATCH = {"isend": 2, "irecv": 2, "all_reduce": 6}
PER_STEP = {"all_reduce": 12, "barrier": 2, "broadcast": 2}


@dataclass(slots=True)
class GuardClock:
    """Simulated clock in ns."""

    ns: int = 1

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self.ns += int(seconds * 1e9)


class SlowDriver:
    """Memory source with much free memory, and queries as slow as SGLang's issue 25225 reports (8 ms)."""

    name = "simulated"
    total = 80 * 2**30

    def __init__(self, clock: GuardClock) -> None:
        self._clock = clock

    def free(self) -> int:
        """Advance the clock by ``QUERY_S``, and return 40 GiB."""
        self._clock.advance(QUERY_S)
        return 40 * 2**30

    def process_bytes(self) -> int:
        """Advance the clock by ``CHEAP_CHECK_S``, and return 40 GiB."""
        self._clock.advance(CHEAP_CHECK_S)
        return 40 * 2**30

    def trim(self) -> None:
        """Do nothing: memory never runs out."""

    def clear(self) -> None:
        """Do nothing: memory never runs out."""


def ops() -> dict[str, Callable[[], object]]:
    """Return functions by name; each runs an op that megatron-core uses, and waits for it if it is asynchronous."""
    small, large = torch.zeros(8), torch.zeros(16)
    batch = [dist.P2POp(dist.isend, small, 1), dist.P2POp(dist.irecv, small, 1)]
    gather, scatter = getattr(dist, "all_gather_into_tensor"), getattr(dist, "reduce_scatter_tensor")  # noqa: B009
    return {
        "all_reduce": lambda: dist.all_reduce(small),
        "all_gather_into_tensor": lambda: gather(large, small),
        "reduce_scatter_tensor": lambda: scatter(small, large),
        "broadcast": lambda: dist.broadcast(small, 0),
        "barrier": lambda: dist.barrier(),
        "all_reduce, later": lambda: wait(dist.all_reduce(small, async_op=True)),
        "isend": lambda: wait(dist.isend(small, 1)),
        "irecv": lambda: wait(dist.irecv(small, 1)),
        "send": lambda: dist.send(small, 1),
        "batch_isend_irecv": lambda: [wait(work) for work in dist.batch_isend_irecv(batch)],
    }


def wait(work: dist.Work | None) -> None:
    """Wait for an asynchronous op."""
    assert work is not None
    work.wait()


def microseconds(call: Callable[[], object]) -> float:
    """Return the microseconds of one call, averaged over ``CALLS`` calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


# Arms to compare with torch alone: the installed guard, and True if the hot path is in C.
ARMS = {
    "off": (GuardSpec(wrap=False), True),
    "never": (GuardSpec(wrap=True, default=MemoryPolicy(checks="never")), True),
    "auto": (GuardSpec(wrap=True, default=MemoryPolicy(checks="auto")), True),
    "never, in Python": (GuardSpec(wrap=True, default=MemoryPolicy(checks="never")), False),
}


def wrapped_calls(call: Callable[[], object]) -> int:
    """Run ``call`` with the wrapper installed, remove the wrapper, and return the number of wrapped calls, including waits."""
    wrapper = install.install(GuardSpec(wrap=True), CPU, 0)
    assert wrapper is not None
    works: Any = dist.Work
    torch_wait, waits = works.wait, list[object]()

    def counted(work: object) -> object:
        waits.append(work)
        return torch_wait(work)

    works.wait = counted
    try:
        call()
    finally:
        works.wait = torch_wait
    calls = sum(counter.calls for counter in wrapper.counters())
    install.remove()
    return calls + len(waits)


def cost(rounds: int) -> Iterator[str]:
    """Yield the lines of a table: the time of each op without the wrapper, and the time that each arm adds to it.

    Both are in microseconds, as medians over alternating rounds and as minima, which other work affects least.

    Iterate within a ``world`` block.
    """
    heads = ["raw us", *(f"{arm}, over raw" for arm in ARMS)]
    yield "| " + " | ".join(["op", "wrapped calls", *heads, "quickest: raw us", *heads[1:]]) + " |"
    yield "|---" * (2 + 2 * len(heads)) + "|"
    for name, call in ops().items():
        times: dict[str, list[float]] = {"raw": [], **{arm: [] for arm in ARMS}}
        for _ in range(rounds):
            for arm, values in times.items():
                if arm != "raw":
                    spec, in_c = ARMS[arm]
                    install.install(spec, CPU, 0, in_c=in_c)
                call()
                values.append(microseconds(call))
                install.remove()
        raw = times["raw"]
        over = [statistics.median(a - b for a, b in zip(times[arm], raw, strict=True)) for arm in ARMS]
        overhead = [min(times[arm]) - min(raw) for arm in ARMS]
        figures = (statistics.median(raw), *over, min(raw), *overhead)
        yield f"| {name} | {wrapped_calls(call)} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"


def simulate(steps: int) -> Iterator[str]:
    """Yield the lines of a table with a row for each guard preset, from steps of a simulated trainer.

    Iterate within a ``world`` block.
    """
    calls = ops()
    plan = [name for name, n in PER_STEP.items() for _ in range(n)]
    for _ in range(MICRO_BATCHES):
        plan += [name for name, n in PER_MICRO_BATCH.items() for _ in range(n)]
        plan += [name for name, n in PER_LAYER.items() for _ in range(n * LAYERS)]
    yield (
        f"{len(plan)} collectives of {OP_S * 1e6:.0f} us, {COMPUTE_S:g} s of computation and {QUERY_S * 1e3:g} ms per "
        f"query; {steps} steps"
    )
    yield ""
    yield "| guard | queries per step | guard time per step, ms | share | step time, s | against off |"
    yield "|---|---|---|---|---|---|"
    rows: dict[str, tuple[float, float, float]] = {}
    for preset in ("off", "auto", "slime", "always"):
        spec = guard_spec(load_config(["+recipe=quickstart", f"guard={preset}"], files=False), "simulated")
        clock = GuardClock()
        with simulated_clock(clock):
            wrapper = install.install(replace(spec, folder=None), CPU, 0, SlowDriver(clock), in_c=False)
            for _ in range(steps):
                for name in plan:
                    calls[name]()
                    clock.advance(OP_S + COMPUTE_S / len(plan))
        seconds = clock.ns / 1e9 / steps
        counters = wrapper.counters() if wrapper is not None else []
        queries = sum(c.checks for c in counters) / steps
        rows[preset] = (queries, sum(c.check_ns + c.clear_ns for c in counters) / 1e6 / steps, seconds)
        install.remove()
    for preset, (queries, check_ms, seconds) in rows.items():
        share, ratio = check_ms / 1e3 / seconds, seconds / rows["off"][2]
        yield f"| {preset} | {queries:.1f} | {check_ms:.2f} | {share:.2%} | {seconds:.3f} | {ratio:.2f} |"


@contextlib.contextmanager
def simulated_clock(clock: GuardClock) -> Generator[None]:
    """Replace the clock of the wrapper and its guard, and ``time.perf_counter_ns``, by ``clock`` within the block."""
    original = time.perf_counter_ns
    op_wrappers.clock = wrapper_module.clock = time.perf_counter_ns = clock
    try:
        yield
    finally:
        op_wrappers.clock = wrapper_module.clock = time.perf_counter_ns = original


@contextlib.contextmanager
def world() -> Generator[None]:
    """Initialise, within the block, a world of two ranks that communicates nothing (torch's fake backend)."""
    original = FakeWork.wait
    del FakeWork.wait  # then Work.wait is called, as for works of gloo and NCCL
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
        FakeWork.wait = original


def main(argv: Sequence[str]) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("cost", "simulate"))
    parser.add_argument("--steps", type=at_least(1), default=STEPS, help="steps of the simulated trainer")
    parser.add_argument("--rounds", type=at_least(1), default=ROUNDS, help=f"rounds of {CALLS} calls of each op")
    arguments = parser.parse_args(argv)
    with world():
        for line in cost(arguments.rounds) if arguments.table == "cost" else simulate(arguments.steps):
            sys.stdout.write(visible(line + "\n"))
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
