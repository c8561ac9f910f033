"""A rank's state moves to host memory and back between the phases of the loop, and no result changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_like.config.schema.residency import COLLECT, GRADIENTS, OPTIMIZER, PUSH, SAVE, STEP, WEIGHTS
from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.rank import residency
from tests.train.jobs import SP, RankJob, Results

CASES: dict[str, tuple[Layout, str, dict[str, Any]]] = {
    "bfloat16 tp2": (Layout(**SP), "two layers", {"dtype": "bfloat16"}),
    "float32 dp2": (Layout(dp=2), "two layers", {}),
    "float32 without distributed optimizer": (Layout(dp=2, distributed_optimizer=False), "two layers", {}),
    "bfloat16 experts": (Layout(dp=2, ep=2), "few experts", {"dtype": "bfloat16"}),
}
TARGET = "tests.train.residency:rollouts"
JOBS = {
    2: [
        *(RankJob(f"offload {name}", TARGET, case) for name, case in CASES.items()),
        RankJob("offload fault", TARGET, (Layout(**SP), "two layers", {"dtype": "bfloat16"}, True)),
    ]
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_moving_the_state_changes_no_result(name: str, results: Results) -> None:
    for rank in results[f"offload {name}"]:
        assert rank["offloaded"] == rank["resident"]


@pytest.mark.ranks
def test_state_that_is_not_copied_back_is_noticed(results: Results) -> None:
    assert all(rank["offloaded"] != rank["resident"] for rank in results["offload fault"])


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_each_phase_has_its_parts_on_the_device(name: str, results: Results) -> None:
    for rank in results[f"offload {name}"]:
        weights, gradients, optimizer = rank["bytes"][STEP]
        assert min(weights, gradients, optimizer) > 1_000
        assert rank["bytes"] == {
            COLLECT: (0, 0, 0),
            PUSH: (weights, 0, 0),
            SAVE: (weights, 0, optimizer),
            STEP: (weights, gradients, optimizer),
        }


def test_a_failed_move_continues_with_the_next_call() -> None:
    first, second = torch.arange(6.0), torch.arange(4.0)
    view = first[2:4]
    state = residency.DeviceState(
        {WEIGHTS: lambda: [first, view], GRADIENTS: lambda: [], OPTIMIZER: lambda: [second]}, torch.device("cpu")
    )
    state.keep(())
    assert (state.num_bytes(WEIGHTS), state.num_bytes(OPTIMIZER), state.resident) == (0, 0, (GRADIENTS,))
    copies = state._copies.pop(OPTIMIZER)
    with pytest.raises(KeyError):
        state.keep((WEIGHTS, OPTIMIZER))
    assert state.resident == (WEIGHTS, GRADIENTS)
    assert torch.equal(view, torch.tensor([2.0, 3.0]))
    state._copies[OPTIMIZER] = copies
    state.keep((WEIGHTS, OPTIMIZER))
    assert torch.equal(second, torch.arange(4.0))


def test_a_part_that_does_not_fit_uses_no_memory_of_the_device() -> None:
    """The engines may get the memory next."""
    weights = [torch.arange(6.0), torch.arange(4.0)]
    state = residency.DeviceState(
        {WEIGHTS: lambda: weights, GRADIENTS: lambda: [], OPTIMIZER: lambda: []}, torch.device("cpu")
    )
    state.keep(())
    last = state._copies[WEIGHTS].pop("1.0")
    with pytest.raises(KeyError):
        state.keep((WEIGHTS,))
    state.keep(())
    assert state.num_bytes(WEIGHTS) == 0
    state._copies[WEIGHTS]["1.0"] = last
    state.keep((WEIGHTS,))
    assert [weight.tolist() for weight in weights] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
