"""FlowMLA gathers that copy from the memory of other ranks, on a CPU."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch

from slime_like.config.schema.flow_mla import FlowOptions
from slime_like_plugins.flow_mla import host_parts, pull
from slime_like_plugins.flow_mla.host_parts import HostParts
from slime_like_plugins.flow_mla.pull import PullGather
from slime_like_plugins.flow_mla.sharding import ShardedWeights
from tests.engine.flow_models import HIDDEN, WEIGHTS, FlowLayer, GlooRanks, RankMessages, load, tensors

SLOTS, RANKS, LAYERS = 2, 2, 5


def layers_of(group: GlooRanks, rank: int) -> tuple[list[FlowLayer], ShardedWeights]:
    """Return the layers of one rank, whose weights are not loaded."""
    weights = ShardedWeights(FlowOptions(WEIGHTS["mla"]), rank, group.size, group.gather(rank, "p2p"))
    layers = [FlowLayer("mla", index) for index in range(LAYERS)]
    for layer in layers:
        weights.add(layer)
    weights.bind()
    weights.finish_loading()
    return layers, weights


def outputs(layers: list[FlowLayer], seed: int) -> torch.Tensor:
    """Run the layers on random tokens."""
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(seed))
    for layer in layers:
        x = layer(x)
    return x


def reference(seed: int) -> list[FlowLayer]:
    """Return layers that hold all weights."""
    layers = [FlowLayer("mla", index) for index in range(LAYERS)]
    load(layers, tensors(layers, seed), lambda layer, compute: compute())
    return layers


@torch.no_grad()
def test_a_rank_runs_forwards_in_which_the_others_take_no_part() -> None:
    """Rank 1 runs a single forward and waits until rank 0 has run six; all-gathers would wait for rank 1."""
    group, end_event = GlooRanks(RANKS, SLOTS), threading.Event()
    full = reference(1)

    def work(rank: int) -> None:
        layers, weights = layers_of(group, rank)
        load(layers, tensors(layers, 1), weights.update)
        for step in range(1 if rank else 6):
            assert torch.equal(outputs(layers, step), outputs(full, step))
        if rank == 0:
            end_event.set()
        assert end_event.wait(30), "rank 0 has not ended its forwards"

    group.run(work)


@torch.no_grad()
def test_a_rank_does_not_write_its_part_while_another_one_reads_it() -> None:
    """Rank 1 begins an update at once, rank 0 after three more forwards, which still use the old weights."""
    group, full = GlooRanks(RANKS, SLOTS), reference(1)
    begin_event = threading.Event()

    def work(rank: int) -> None:
        layers, weights = layers_of(group, rank)
        load(layers, tensors(layers, 1), weights.update)
        outputs(layers, 0)
        if rank == 0:
            assert begin_event.wait(30)
            for step in range(3):
                assert torch.equal(outputs(layers, step), outputs(full, step))
        else:
            begin_event.set()
        load(layers, tensors(layers, 2), weights.update)
        assert torch.equal(outputs(layers, 7), outputs(reference(2), 7))

    group.run(work)


def test_a_copy_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_parts, "DEADLINE", timedelta(milliseconds=1))
    with pytest.raises(TimeoutError, match="attention weights from the memory of other ranks did not finish in 0 s"):
        host_parts.ThreadCopy(Future()).wait()


class UnreadableMemory(HostParts):
    """Memory whose file descriptor is closed, like that of a rank that has exited."""

    def address(self, part: torch.Tensor) -> dict[str, Any]:
        address = dict(super().address(part))
        return address | {"fd": 1 << 20}


@pytest.mark.parametrize("fault", ["memory", "machine", "sizes"])
def test_every_rank_ends_if_one_cannot_read_the_memory_of_another(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = GlooRanks(RANKS, SLOTS)
    expected = {
        "memory": f"No such file or directory: '/proc/{os.getpid()}/fd/{1 << 20}'",
        "machine": "it runs on another machine",
        "sizes": r"its parts have \[128\] bytes instead of \[64\]",
    }
    if fault == "machine":
        monkeypatch.setattr(pull, "machine", lambda: threading.current_thread().name)

    def work(rank: int) -> str:
        memory = UnreadableMemory(SLOTS) if fault == "memory" and rank == 1 else HostParts(SLOTS)
        groups: Any = group._groups  # pyright: ignore[reportPrivateUsage]
        gather = PullGather(rank, RANKS, RankMessages(groups[rank][0]), memory)
        with pytest.raises(SystemExit) as error:
            gather.share([gather.allocate(64 * (1 + (fault == "sizes" and rank)), torch.device("cpu"))])
        return str(error.value)

    messages = group.run(work)
    assert messages[0] == messages[1]
    assert "set rollout.flow_mla.transport=collective (--flow-mla-transport collective)" in messages[0]
    with pytest.raises(SystemExit, match=expected[fault]):
        raise SystemExit(messages[0])
