"""FlowMLA gathers run ahead of the layers, and never during an update or a release of memory."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like_plugins.flow_mla.gather import GroupGather
from slime_like_plugins.flow_mla.layout import Matrix, layer_layout
from slime_like_plugins.flow_mla.pipeline import GatherPipeline

SLOTS = 2


def test_gathers_end_before_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    events: list[str] = []
    pipeline = SimpleNamespace(drain=lambda: events.append("drain"))
    monkeypatch.setattr(hooks, "_models", [SimpleNamespace(pipeline=pipeline)])
    assert hooks.release_memory(lambda manager, request: events.append(request), None, "release") is None
    assert events == ["drain", "release"]


def test_a_gather_in_flight_ends_before_an_update_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward leaves prefetches for the next one in flight; the update empties the slots, which hold old weights."""
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    layouts = [layer_layout([Matrix((16 * (1 + index),), (1,), torch.float32)], 1) for index in range(3)]
    clock = RecordedGather([layout.num_bytes for layout in layouts])
    pipeline = GatherPipeline(layouts, SLOTS, clock)  # pyright: ignore[reportArgumentType]
    pipeline.begin()
    monkeypatch.setattr(hooks, "_models", [SimpleNamespace(pipeline=pipeline)])
    assert hooks.open_update(lambda updater: clock.events.append("update") or "begun", None) == "begun"
    assert clock.events == ["meet", "start 0", "start 1", "wait 0", "wait 1", "meet", "update"]
    assert [slot.layer for slot in pipeline.slots] == [None, None]


class RecordedGather:
    """Fake gather of one rank that records its starts and waits."""

    def __init__(self, layers: list[int]) -> None:
        self.events: list[str] = []
        self._layer_of_size = {size: index for index, size in enumerate(layers)}

    def meet(self) -> None:
        self.events.append("meet")

    def start(self, slot: int, layer: int, buffer: Tensor) -> Wait:
        assert self._layer_of_size[len(buffer)] == layer
        self.events.append(f"start {layer}")
        return Wait(self.events, layer)


class Wait:
    """Pending gather that records when it is waited for."""

    def __init__(self, events: list[str], layer: int) -> None:
        self._events, self._layer = events, layer

    def wait(self) -> None:
        self._events.append(f"wait {self._layer}")


def test_the_weights_of_a_layer_arrive_while_the_layer_before_it_runs() -> None:
    layouts = [layer_layout([Matrix((16 * (1 + index),), (1,), torch.float32)], 1) for index in range(5)]
    clock = RecordedGather([layout.num_bytes for layout in layouts])
    pipeline = GatherPipeline(layouts, SLOTS, clock)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        pipeline.begin()
        for layer in range(5):
            pipeline.wait(layer)
            clock.events.append(f"run {layer}")
            pipeline.advance(layer)
    steps = [
        "wait 0",
        "run 0",
        "start 2",
        "wait 1",
        "run 1",
        "start 3",
        "wait 2",
        "run 2",
        "start 4",
        "wait 3",
        "run 3",
    ]
    steps += ["start 1", "wait 4", "run 4", "start 0"]
    assert clock.events == ["meet", "start 0", "start 1", *steps, *steps]
    pipeline.drain()
    assert sorted(clock.events[-3:-1]) == ["wait 0", "wait 1"] and clock.events[-1] == "meet"
    pipeline.drain()
    assert clock.events[-1] == "meet" and clock.events.count("meet") == 2, "empty slots are not read"
    with pytest.raises(RuntimeError, match="sharded layer 3 runs while its slot holds layer 1"):
        pipeline.begin()
        pipeline.wait(3)


def test_collective_gathers_of_a_gpu_wait_for_writes_of_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's loaders write in threads, on another stream than forwards and gathers."""
    events: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", events.append)
    for part in (SimpleNamespace(is_cuda=True, device="cuda:1"), torch.zeros(1)):
        gather = GroupGather([])
        gather.meet()  # before there are parts
        gather.share([part])  # pyright: ignore[reportArgumentType]
        gather.meet()
    assert events == ["cuda:1"]


def test_a_slot_of_the_largest_layer_is_the_one_of_loading() -> None:
    """With layers of several sizes, the loading buffer becomes the slot of the largest layer."""
    layouts = [layer_layout([Matrix((16 * size,), (1,), torch.float32)], 1) for size in (1, 2, 3, 5, 4)]
    for num_slots, sizes in ((2, [4, 5]), (3, [5, 4, 3]), (8, [1, 2, 3, 5, 4])):
        gather: Any = RecordedGather([layout.num_bytes for layout in layouts])
        pipeline = GatherPipeline(layouts, 1, gather)
        (single,) = pipeline.slots
        pipeline.fetch(2)
        pipeline.grow(num_slots)
        assert [len(slot.buffer) for slot in pipeline.slots] == [64 * size for size in sizes]
        assert single in pipeline.slots and single.layer is None
