"""FlowMLA on one GPU, without SGLang: copies between two processes by CUDA IPC, streams and CUDA graphs.

Needs torch and pytest only:

    python -m pytest -q --noconftest -m gpu tests/engine/test_flow_mla_gpu.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "plugins")]  # not installed on every machine with a GPU

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from slime_like.config.schema.flow_mla import FlowOptions  # noqa: E402
from slime_like_plugins.flow_mla.device_parts import DeviceParts  # noqa: E402
from slime_like_plugins.flow_mla.gather import GroupGather, Pending, create_groups  # noqa: E402
from slime_like_plugins.flow_mla.layout import Matrix, layer_layout  # noqa: E402
from slime_like_plugins.flow_mla.pipeline import GatherPipeline  # noqa: E402
from slime_like_plugins.flow_mla.pull import GroupExchange, PullGather  # noqa: E402
from slime_like_plugins.flow_mla.sharding import ShardedWeights  # noqa: E402
from tests.engine.flow_models import HIDDEN, KINDS, WEIGHTS, FlowLayer, load, tensors  # noqa: E402
from tests.gpu_processes import forking_context  # noqa: E402
from tests.values import has_values  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RANKS, SLOTS, LAYERS = 2, 2, 5
TOKENS = 7
DEADLINE = 240  # seconds of a test


# ---- processes -------------------------------------------------------------------------------------------------------
def run_rank(rank: int, store: str, work: Callable[[int, PullGather], object], results: Any) -> None:
    """Run ``work`` on one of two ranks of the same GPU, and put its result."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    (group,) = create_groups([range(RANKS)], 1, "gloo")
    gather = PullGather(rank, RANKS, GroupExchange(group), DeviceParts(torch.device("cuda", 0), SLOTS))
    with torch.no_grad():
        results.put((rank, work(rank, gather)))
    dist.barrier()  # the other rank reads this rank's memory until then
    dist.destroy_process_group()


def on_two_ranks(work: Callable[[int, PullGather], object], folder: Path) -> list[Any]:
    """Return the results of ``work`` in rank order, or raise the error of a rank."""
    results = forking_context().Queue()
    ranks = torch.multiprocessing.start_processes(
        run_rank, (str(folder / "store"), work, results), RANKS, join=False, start_method="forkserver"
    )
    assert ranks is not None, "they are not joined"
    end = time.monotonic() + DEADLINE
    try:
        while not ranks.join(max(1.0, end - time.monotonic())):  # raises the error of a rank
            assert time.monotonic() < end, f"the ranks have not ended in {DEADLINE} s"
    finally:
        for process in filter(None, ranks.processes):
            process.kill()
    return [result for _, result in sorted((results.get(timeout=20) for _ in range(RANKS)), key=lambda item: item[0])]


# ---- work of a rank --------------------------------------------------------------------------------------------------
def layers_of(rank: int, gather: PullGather, kind: str) -> tuple[list[FlowLayer], ShardedWeights]:
    """Return ``LAYERS`` sharded layers, whose weights are not loaded, and the object that holds their weights."""
    weights = ShardedWeights(FlowOptions(WEIGHTS[kind], SLOTS), rank, RANKS, gather)
    layers: list[FlowLayer] = []
    for index in range(LAYERS):
        layers.append(FlowLayer(kind, index).cuda())
        weights.add(layers[-1])
    weights.bind()
    weights.finish_loading()
    return layers, weights


def full_layers(kind: str, seed: int) -> list[FlowLayer]:
    """Return ``LAYERS`` layers that hold their complete weights, those of ``seed``."""
    layers = [FlowLayer(kind, index).cuda() for index in range(LAYERS)]
    load(layers, tensors(layers, seed), lambda layer, compute: compute())
    return layers


def forward(layers: Sequence[FlowLayer], x: Tensor) -> Tensor:
    """Return the output of the layers, one after another, for ``x``."""
    for layer in layers:
        x = layer(x)
    return x


def tokens(rank: int, step: int) -> Tensor:
    """Return random activations [TOKENS, HIDDEN], which depend on rank and step."""
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(10 * rank + step)).cuda()


def assert_equal(result: Tensor, expected: Tensor, location: str = "") -> None:
    """Assert equal shapes and, if the device computes values, equal bits."""
    assert result.shape == expected.shape, location
    if has_values():
        assert torch.equal(result, expected), location


def compare_eager(rank: int, gather: PullGather) -> bool:
    """Compare forwards of sharded and full layers after each of two updates, for every kind of layers. Return True.

    Rank 1 skips every second step, because gathers do not need the other rank to run in step.
    """
    for kind in KINDS:
        layers, weights = layers_of(rank, gather, kind)
        gather = PullGather(rank, RANKS, gather._exchange, DeviceParts(torch.device("cuda", 0), SLOTS))  # pyright: ignore[reportPrivateUsage]
        for seed in (1, 2):
            load(layers, tensors(layers, seed), weights.update)
            reference = full_layers(kind, seed)
            for step in range(0, 12, 1 + rank):
                result, expected = forward(layers, tokens(rank, step)), forward(reference, tokens(rank, step))
                assert_equal(result, expected, f"{kind}, rank {rank}, seed {seed}, step {step}")
        assert not weights.slot_problems()
        weights.pipeline.drain()
    return True


def compare_graph(rank: int, gather: PullGather) -> bool:
    """Compare replays of a captured forward with full layers, after each of three weight updates.

    Eager forwards run between the replays. Return True if 60 replays were compared.
    """
    layers, weights = layers_of(rank, gather, "mla")
    x, replays = tokens(rank, 0), 0
    graph, output = torch.cuda.CUDAGraph(), x
    for seed in (1, 2, 3):
        load(layers, tensors(layers, seed), weights.update)
        reference = full_layers("mla", seed)
        if seed == 1:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                forward(layers, x)  # warm-up
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                output = forward(layers, x)
        for step in range(20):
            x.copy_(tokens(rank, step))
            weights.pipeline.begin()  # as the hook around ModelRunner.forward does
            graph.replay()
            assert_equal(output, forward(reference, x), f"rank {rank}, seed {seed}, replay {step}")
            if step % 5 == 4:
                assert_equal(forward(layers, x), forward(reference, x), "eager after a replay")
            replays += 1
    assert not weights.slot_problems(), "a graph reads fixed addresses"
    return replays == 60


def count_bytes(rank: int, gather: PullGather) -> tuple[int, int, int, int]:
    """Return four numbers of bytes: peak while layers are built and loaded, use afterwards, formula, unsharded weights.

    The first two are counted by torch's allocator. The formula gives the use afterwards without placeholders.
    """
    shape, num_layers = (2048, 4096), 16
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = ShardedWeights(FlowOptions(("o_proj",), SLOTS), rank, RANKS, gather)
    layers: list[torch.nn.Module] = []
    for _ in range(num_layers):
        layers.append(one_matrix(*shape))
        weights.add(layers[-1])
    weights.bind()
    for index, layer in enumerate(layers):
        weight: Any = layer.get_submodule("o_proj").weight
        weight.weight_loader(weight, torch.full(shape, float(index), device="cpu"))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    counts = weights.finish_loading()
    end = torch.cuda.memory_allocated() - before
    return peak, end, counts.private + counts.slots, counts.full


def one_matrix(rows: int, columns: int) -> torch.nn.Module:
    """Return a layer with one weight on the GPU."""
    layer, projection = torch.nn.Module(), torch.nn.Module()
    weight = torch.nn.Parameter(torch.empty(rows, columns, device="cuda"), requires_grad=False)
    vars(weight)["weight_loader"] = lambda parameter, checkpoint_weight: parameter.data.copy_(checkpoint_weight)
    projection.weight = weight
    layer.add_module("o_proj", projection)
    return layer


class TimedGather:
    """FlowMLA's gather with events before and after each copy on its stream."""

    def __init__(self, gather: PullGather, memory: DeviceParts) -> None:
        self._gather, self._streams = gather, memory._streams  # pyright: ignore[reportPrivateUsage]
        self.allocate, self.share = gather.allocate, gather.share
        self.copies: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}  # events of each layer's last copy

    def meet(self) -> None:
        """Do nothing: the other rank takes no part in gathers and only holds its parts."""

    def start(self, slot: int, layer: int, buffer: Tensor) -> Pending:
        self._streams[slot].wait_stream(torch.cuda.current_stream())
        begin = timestamp(self._streams[slot])
        pending = self._gather.start(slot, layer, buffer)
        self.copies[layer] = begin, timestamp(self._streams[slot])
        return pending


def timestamp(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """Return an event that measures time, recorded on ``stream`` or the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream or torch.cuda.current_stream())
    return event


def trace_overlap(rank: int, gather: PullGather) -> dict[str, float]:
    """Return the milliseconds of a forward with and without gathers and of a copy, and the overlap of the copies.

    The overlap is the share of the copies' time in which the previous layer computes. Rank 1 only lends its memory.
    """
    memory = DeviceParts(torch.device("cuda", 0), SLOTS)
    gather = PullGather(rank, RANKS, gather._exchange, memory)  # pyright: ignore[reportPrivateUsage]
    timed_gather, width, num_layers = TimedGather(gather, memory), 4096, 8
    layout = layer_layout([Matrix((width, width), (width, 1), torch.bfloat16)], RANKS)
    parts = [gather.allocate(layout.part_bytes, torch.device("cuda")) for _ in range(num_layers)]
    for part in parts:
        part.zero_()
    torch.cuda.synchronize()
    timed_gather.share(parts)
    if rank:
        return {}
    pipeline = GatherPipeline([layout] * num_layers, SLOTS, timed_gather, torch.device("cuda", 0))
    x = torch.randn(2048, width, device="cuda", dtype=torch.bfloat16)
    other_matrices = torch.randn(4, width, width, device="cuda", dtype=torch.bfloat16)
    layer_times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def products(weight: Tensor) -> None:
        for matrix in (weight, *other_matrices):
            torch.mm(x, matrix)

    def gathered() -> None:
        pipeline.begin()
        layer_times.clear()
        for layer in range(num_layers):
            pipeline.wait(layer)
            begin = timestamp()
            products(layout.view(pipeline.slot(layer).buffer, 0))
            layer_times.append((begin, timestamp()))
            pipeline.advance(layer)

    def milliseconds(work: Callable[[], None]) -> float:
        for _ in range(3):
            work()
        begin = timestamp()
        for _ in range(10):
            work()
        end = timestamp()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 10

    def whole_weights() -> None:
        for _ in range(num_layers):
            products(other_matrices[0])

    unsharded_ms = milliseconds(whole_weights)
    forward_ms = milliseconds(gathered)
    zero = layer_times[0][0]
    spans = [(zero.elapsed_time(begin), zero.elapsed_time(end)) for begin, end in layer_times]
    copies = {layer: (zero.elapsed_time(b), zero.elapsed_time(e)) for layer, (b, e) in timed_gather.copies.items()}
    inner = range(SLOTS, num_layers)  # copies of this forward
    hidden_ms = sum(max(0.0, min(copies[i][1], spans[i - 1][1]) - max(copies[i][0], spans[i - 1][0])) for i in inner)
    total = sum(copies[i][1] - copies[i][0] for i in inner)
    share = hidden_ms / total if has_values() else 0.0
    return {"forward": forward_ms, "whole": unsharded_ms, "copy": total / len(inner), "hidden": share}


# ---- tests -----------------------------------------------------------------------------------------------------------
def test_two_processes_compute_the_bits_of_full_layers(tmp_path: Path) -> None:
    """Layers of each kind, an odd number, are bitwise equal over two updates, on ranks that do not run in step."""
    assert on_two_ranks(compare_eager, tmp_path) == [True, True]


def test_a_cuda_graph_replays_gathers_over_weight_updates(tmp_path: Path) -> None:
    assert on_two_ranks(compare_graph, tmp_path) == [True, True]


def test_a_rank_that_loads_never_holds_more_than_its_parts_and_a_layer(tmp_path: Path) -> None:
    """Compare the formula with the bytes that torch's allocator counts while layers are built and loaded."""
    for peak, end, formula, full in on_two_ranks(count_bytes, tmp_path):
        layer = full // 16
        assert formula == full // RANKS + SLOTS * layer
        assert formula <= end <= formula + layer // 64, "sharded weights, and placeholders of 512 bytes"
        assert peak <= full // RANKS + layer + layer // 64


def test_copies_run_while_layers_compute(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """A copy begins when its slot is free, and overlaps mostly with the computation of the layer before its own."""
    times, _ = on_two_ranks(trace_overlap, tmp_path)
    record_property("milliseconds", times)
    assert times["hidden"] > 0.5 or not has_values(), times


def test_gathers_of_nccl_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of NCCL gathers, with at most two thread blocks each, fork and join within a capture on one rank."""
    if not hasattr(dist, "all_gather_single"):  # torch before 2.14
        monkeypatch.setattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor"), raising=False)  # noqa: B009
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with torch.no_grad():
            gather = GroupGather(create_groups([range(1)], SLOTS, "nccl", max_ctas=2))
            weights = ShardedWeights(FlowOptions(WEIGHTS["mla"], SLOTS), 0, 1, gather)
            layers = [FlowLayer("mla", index).cuda() for index in range(LAYERS)]
            for layer in layers:
                weights.add(layer)
            weights.bind()
            load(layers, tensors(layers, 1), weights.update)
            weights.finish_loading()
            x, graph = tokens(0, 0), torch.cuda.CUDAGraph()
            forward(layers, x)
            with torch.cuda.graph(graph):
                output = forward(layers, x)
            for seed in (2, 3):
                load(layers, tensors(layers, seed), weights.update)
                weights.pipeline.begin()
                graph.replay()
                assert_equal(output, forward(full_layers("mla", seed), x))
    finally:
        dist.destroy_process_group()
