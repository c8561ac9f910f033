"""FlowMLA without an engine: sharded layers are bitwise equal to full ones, take updates, and fit the formula."""

from __future__ import annotations

import functools
import gc
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from slime_like.config.schema.flow_mla import FlowOptions
from slime_like_plugins.flow_mla.layout import Matrix, flow_bytes, layer_layout
from slime_like_plugins.flow_mla.sharding import ShardedWeights
from slime_like_plugins.sglang_hooks import HELD_PART
from slime_like_plugins.weight_commit.hooks import poison, unwritten
from tests.engine.flow_models import HIDDEN, KINDS, WEIGHTS, AbsorbedAttention, FlowLayer, GlooRanks, load, tensors

SLOTS = 2


@functools.cache
def ranks(size: int, num_slots: int = SLOTS) -> GlooRanks:
    """Return connected ranks, which tests share."""
    return GlooRanks(size, num_slots)


@pytest.fixture(scope="module", autouse=True)
def no_ranks_afterwards() -> Iterator[None]:
    """Close the ranks after the tests, because each of their groups has a thread that wakes up 100 times per second.

    Free the weights and layers that the tests shared.
    """
    yield
    for cached in (ranks, weights_of, expected):
        cached.cache_clear()
    gc.collect()


def sharded_layers(
    group: GlooRanks,
    rank: int,
    kind: str,
    count: int,
    num_slots: int = SLOTS,
    transport: str = "collective",
    *,
    loading: bool = False,
) -> tuple[list[FlowLayer], ShardedWeights]:
    """Return the layers of one rank; with ``loading``, in the state before the end of SGLang's first load."""
    weights = ShardedWeights(FlowOptions(WEIGHTS[kind], num_slots), rank, group.size, group.gather(rank, transport))
    layers: list[FlowLayer] = []
    for index in range(count):
        layers.append(FlowLayer(kind, index))
        weights.add(layers[-1])
    weights.bind()
    if not loading:
        weights.finish_loading()
    return layers, weights


def plain_update(layer: FlowLayer, compute: Any) -> None:
    """Compute weights of a layer that is not sharded."""
    compute()


def forward(layers: list[FlowLayer], x: Tensor) -> Tensor:
    """Run the layers."""
    for layer in layers:
        x = layer(x)
    return x


def inputs(rank: int, step: int) -> Tensor:
    """Return the hidden states of a rank's tokens at a step. Their number depends on rank and step, and may be 0."""
    num_tokens = 0 if (rank + step) % 3 == 1 else 1 + (5 * rank + 3 * step) % 7
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(10 * rank + step))


def parameters(layers: list[FlowLayer]) -> list[tuple[str, Tensor]]:
    """Return the named tensors that a commit checks: this rank's parts of sharded weights, and all other parameters."""
    named_tensors = [
        (f"{index}.{name}", p) for index, layer in enumerate(layers) for name, p in layer.named_parameters()
    ]
    for index, layer in enumerate(layers):
        if isinstance(layer.self_attn, AbsorbedAttention):
            named_tensors += [(f"{index}.{name}", getattr(layer.self_attn, name)) for name in ("w_kc", "w_vc")]
    return [(name, getattr(tensor, HELD_PART, tensor)) for name, tensor in named_tensors]


@functools.cache
def weights_of(kind: str, count: int, seed: int) -> list[tuple[int, str, int, Tensor]]:
    """Return ``tensors`` of layers of this kind."""
    return tensors([FlowLayer(kind, index) for index in range(count)], seed)


@functools.cache
@torch.no_grad()
def expected(kind: str, count: int, seed: int, partial: int | None = None) -> list[FlowLayer]:
    """Return full layers after a load of ``seed`` and, if given, a load of the last layer from seed ``partial``."""
    layers = [FlowLayer(kind, index) for index in range(count)]
    load(layers, weights_of(kind, count, seed), plain_update)
    if partial is not None:
        load(layers, (item for item in weights_of(kind, count, partial) if item[0] == count - 1), plain_update)
    return layers


MATRIX = [("collective", size, count) for size in (2, 3, 4) for count in (4, 5)] + [("p2p", 2, 5), ("p2p", 3, 4)]
"""Transport, number of ranks and of layers."""
LARGE_MATRIX = [("collective", 2, 61), ("collective", 3, 61), ("collective", 4, 61), ("p2p", 4, 61)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("transport", "size", "count"), [*MATRIX, *(pytest.param(*case, marks=pytest.mark.slow) for case in LARGE_MATRIX)]
)
def test_sharded_layers_compute_the_same_bits(transport: str, size: int, count: int, kind: str) -> None:
    """Compare after a load, after a full update, and after an update of one layer while gathers are in flight."""
    group = ranks(size)
    references = [expected(kind, count, 1), expected(kind, count, 2), expected(kind, count, 2, partial=3)]

    def work(rank: int) -> None:
        layers, weights = sharded_layers(group, rank, kind, count, transport=transport, loading=True)
        sharded = weights.layers
        full = sum(item.num_bytes for layer in sharded for item in layer.layout.matrices)
        assert weights.held_bytes() == full // size + full // len(sharded)
        assert len(sharded) == (count // 4 if kind == "hybrid" else count)
        for step, reference in enumerate(references):
            if step < 2:
                weights.pipeline.drain()  # as begin_weight_update does
                poison(parameters(layers))
                load(layers, weights_of(kind, count, step + 1), weights.update)
                assert not unwritten(parameters(layers))
                if step == 0:
                    weights.finish_loading()
                    assert weights.held_bytes() == full // size + min(SLOTS, len(sharded)) * full // len(sharded)
            else:
                load(layers, (item for item in weights_of(kind, count, 3) if item[0] == count - 1), weights.update)
            for x in (inputs(rank, step), inputs(rank, step + 1)) if step == 1 else (inputs(rank, step),):
                assert torch.equal(forward(layers, x), forward(reference, x)), f"rank {rank}, step {step}"
        assert not weights.slot_problems() and not weights.key_problems()

    group.run(work)


class StorageCounter(TorchDispatchMode):
    """Dispatch mode that tracks the peak bytes of the storages that this thread allocates."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._bytes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, Tensor):
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` until it is freed."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        self._bytes[storage.data_ptr()] = storage.nbytes()
        live = [address for address, reference in self._storages.items() if not reference.expired()]
        self.peak = max(self.peak, sum(self._bytes[address] for address in live))


@pytest.mark.parametrize("transport", ["collective", "p2p"])
@pytest.mark.parametrize("kind", ["mla", "gqa", "mqa"])
@pytest.mark.parametrize(("size", "count", "num_slots"), [(2, 5, 2), (3, 4, 3), (4, 7, 2)])
def test_loading_never_holds_more_than_the_parts_and_one_layer(
    size: int, count: int, num_slots: int, kind: str, transport: str
) -> None:
    """Count every storage that a rank allocates while it builds and loads the layers, without the checkpoint."""
    group = ranks(size, num_slots)
    checkpoint = tensors([FlowLayer(kind, index) for index in range(count)], 1)

    def work(rank: int) -> None:
        gather = group.gather(rank, transport)
        allocate, share, storages = gather.allocate, gather.share, StorageCounter()

        def allocate_counted(num_bytes: int, device: torch.device) -> Tensor:
            part = allocate(num_bytes, device)
            storages.count(part)  # shared memory is not allocated by torch
            return part

        def uncounted(parts: Sequence[Tensor]) -> None:
            with _disable_current_modes():
                share(parts)  # its messages are not weights

        vars(gather).update(allocate=allocate_counted, share=uncounted)
        weights = ShardedWeights(FlowOptions(WEIGHTS[kind], num_slots), rank, size, gather)
        layers: list[FlowLayer] = []
        with storages:
            for index in range(count):
                layers.append(FlowLayer(kind, index))
                weights.add(layers[-1])
            weights.bind()
            load(layers, checkpoint, weights.update)
        counts = weights.finish_loading()
        unsharded_bytes = sum(
            p.nbytes for layer in layers for _, p in layer.named_parameters() if not hasattr(p, HELD_PART)
        )
        # Until ``bind``, sharded weights are placeholders of one element. Loading w_kc and w_vc takes temporary copies.
        placeholders = sum(4 for layer in layers for _, p in layer.named_parameters() if hasattr(p, HELD_PART))
        absorbed = (
            2 * layers[0].self_attn.get_submodule("kv_b_proj").get_parameter("weight").nbytes if kind == "mla" else 0
        )
        layer_bytes = weights.layers[0].layout.num_bytes
        assert counts.loading == counts.private + layer_bytes == weights.peak_bytes
        assert counts.loading <= storages.peak - unsharded_bytes <= counts.loading + placeholders + absorbed
        assert weights.held_bytes() == counts.private + num_slots * layer_bytes
        x, full = inputs(rank, rank), expected(kind, count, 1)
        assert torch.equal(forward(layers, x), forward(full, x))

    group.run(work)


def test_a_tensor_that_sglang_keeps_of_loading_is_named() -> None:
    """A view of a weight stays in the loading slot, which other layers use afterwards."""
    group = ranks(1)

    def work(rank: int) -> None:
        layers, weights = sharded_layers(group, rank, "gqa", 4, loading=True)
        for layer in layers:
            module = layer.get_submodule("self_attn.o_proj")
            vars(module)["packed"] = module.get_parameter("weight").data[:1]
        weights.finish_loading()
        assert weights.aliases() == [
            f"sharded layer {index}: packed of Linear is in the slot of another layer" for index in (1, 3)
        ]

    group.run(work)


def test_weights_of_a_loader_that_writes_to_the_slot_are_not_committed() -> None:
    """If such an update were committed, the next gather would restore the old weights."""
    group = ranks(2)

    def work(rank: int) -> None:
        layers, weights = sharded_layers(group, rank, "gqa", 4)
        load(layers, tensors(layers, 1), weights.update)
        poison(parameters(layers))
        for layer in layers[:3]:
            for module in layer.modules():
                if hasattr(module, "load"):
                    vars(module.weight)["weight_loader"] = module.load
        load(layers, tensors(layers, 2), weights.update)
        names = [item.name for item in unwritten(parameters(layers))]
        expected_names = {f"{index}.self_attn.{name}.weight" for index in range(3) for name in WEIGHTS["gqa"]}
        assert set(names) <= expected_names and {name[0] for name in names} == {"0", "1", "2"}

    group.run(work)


def test_slots_whose_memory_was_released_are_gathered_again() -> None:
    """After a release of memory, the slots of an engine contain undefined bytes."""
    group, reference = ranks(2), expected("mla", 5, 1)

    def work(rank: int) -> None:
        layers, weights = sharded_layers(group, rank, "mla", 5)
        load(layers, tensors(layers, 1), weights.update)
        for step in range(2):
            assert torch.equal(forward(layers, inputs(rank, step)), forward(reference, inputs(rank, step)))
            weights.pipeline.drain()
            for slot in weights.pipeline.slots:
                slot.buffer.fill_(255)  # NaN

    group.run(work)


def test_an_engine_stops_if_its_weights_were_loaded_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loader does not call ``finish_loading``, so all weights would remain views of one slot."""
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    group = ranks(1)

    def work(rank: int) -> None:
        _, weights = sharded_layers(group, rank, "gqa", 4, loading=True)
        monkeypatch.setattr(hooks, "_models", [weights])
        with pytest.raises(SystemExit, match="the weights were loaded without DefaultModelLoader"):
            hooks.check_loaded(None, None)
        assert hooks.allocate_slots("model") == "model"
        hooks.check_loaded(None, None)
        _, weights = sharded_layers(group, rank, "gqa", 4, loading=True)
        monkeypatch.setattr(hooks, "_models", [weights])
        weights.peak_bytes += 1
        with pytest.raises(SystemExit, match=r"held \d+ bytes of sharded weights while loading"):
            hooks.allocate_slots("model")

    group.run(work)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_every_element_belongs_to_one_rank(size: int) -> None:
    """Matrices of several dtypes, one of them transposed, have sizes that are not multiples of the number of ranks."""
    matrices = [
        Matrix((5, 7), (7, 1), torch.float32),
        Matrix((3, 4, 5), (20, 1, 4), torch.bfloat16),
        Matrix((1, 1), (1, 1), torch.float32),
    ]
    layout = layer_layout(matrices, size)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for rank in range(size):
        part = buffer[rank * layout.part_bytes : (rank + 1) * layout.part_bytes]
        for index in range(len(matrices)):
            layout.part_of(part, rank, index).add_(1)
    for index, item in enumerate(matrices):
        view = layout.view(buffer, index)
        assert (view.shape, view.stride(), view.dtype) == (item.shape, item.stride, item.dtype)
        assert torch.equal(view, torch.ones_like(view))
    counts = flow_bytes([layout] * 3, SLOTS)
    assert counts.full == 3 * sum(math.prod(item.shape) * item.dtype.itemsize for item in matrices)
    assert (counts.private, counts.slots) == (3 * layout.part_bytes, 2 * layout.num_bytes)


def test_three_slots_and_fewer_layers_than_slots() -> None:
    for count in (2, 7):
        reference, group = expected("mqa", count, 1), ranks(2, 3)

        def work(
            rank: int, count: int = count, group: GlooRanks = group, reference: list[FlowLayer] = reference
        ) -> None:
            layers, weights = sharded_layers(group, rank, "mqa", count, 3)
            load(layers, tensors(layers, 1), weights.update)
            for step in range(3):
                assert torch.equal(forward(layers, inputs(rank, step)), forward(reference, inputs(rank, step)))

        group.run(work)
