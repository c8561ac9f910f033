"""Memory of trainer ranks: static part by hand, and the direction of every option."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_like.planner.models import find_shape
from slime_like.planner.offload import gradient_buffers, offload_items
from slime_like.planner.trainer import (
    TrainerSettings,
    allocated_items,
    stage_parameters,
    trainer_memory,
)
from slime_like.util.vocabulary import padded_vocabulary

SHAPE = find_shape("MODEL", "Qwen3-4B")
BASE = TrainerSettings(tp=2, dp=4, tokens=16_384)


def test_static_part_is_18_bytes_per_parameter_on_one_rank_and_less_with_the_distributed_optimizer() -> None:
    one_rank = allocated_items(SHAPE, TrainerSettings()).of("weights", "gradients", "optimizer")
    assert one_rank / SHAPE.parameters == pytest.approx(18, rel=1e-3)
    distributed = allocated_items(SHAPE, BASE).of("weights", "gradients", "optimizer")
    assert distributed / (SHAPE.parameters / 2) == pytest.approx(6 + 12 / 4, rel=1e-3)
    replicated = allocated_items(SHAPE, replace(BASE, distributed_optimizer=False)).of(
        "weights", "gradients", "optimizer"
    )
    assert replicated / (SHAPE.parameters / 2) == pytest.approx(18, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"recompute": "full"}, "activations"),
        ({"tokens": 8_192}, "activations"),
        ({"tp": 4, "dp": 2}, "activations"),
        ({"offload": 0.5}, "optimizer"),
        ({"dp": 8}, "optimizer"),
        ({"logits_chunk": 1_024}, "output layer"),
    ],
)
def test_option_lowers_its_item_and_the_total(change: dict[str, object], item: str) -> None:
    changed = replace(BASE, **change)  # pyright: ignore[reportArgumentType]
    before, after = allocated_items(SHAPE, BASE), allocated_items(SHAPE, changed)
    assert after.of(item) < before.of(item)
    assert trainer_memory(SHAPE, changed).total < trainer_memory(SHAPE, BASE).total


def test_experts_are_divided_by_ep_and_not_by_tp() -> None:
    shape = find_shape("MODEL", "Qwen3-30B-A3B")
    weights = {ep: allocated_items(shape, TrainerSettings(tp=2, dp=4, ep=ep)).of("weights") for ep in (1, 8)}
    assert weights[1] - weights[8] == pytest.approx(2 * shape.routed_parameters * 7 / 8)


def test_latent_down_projections_are_on_each_tensor_parallel_rank_in_full() -> None:
    shape = find_shape("MODEL", "DeepSeek-R1")
    down = 7168 * (1536 + 512 + 64) + 1536 + 512  # both projections and their norms
    replicated = 61 * (down + 2 * 7168) + 7168 + 58 * 7168 * 256  # and layer norms, final norm and routers
    divided = shape.parameters - shape.routed_parameters - replicated
    parameters = stage_parameters(shape, TrainerSettings(tp=8), 0)
    assert parameters.total == divided / 8 + replicated + shape.routed_parameters
    assert parameters.num_saved(TrainerSettings(tp=8, dp=2)) == pytest.approx(shape.parameters / 16)


def test_shards_of_experts_need_less_memory_for_weights_and_more_for_rows() -> None:
    shape, plain = find_shape("MODEL", "Qwen3-30B-A3B"), TrainerSettings(dp=8, ep=4)
    shards, wider = (allocated_items(shape, replace(plain, **sizes)) for sizes in ({"etp": 2}, {"ep": 8}))
    for item in ("weights", "gradients", "optimizer"):
        assert shards.of(item) == pytest.approx(wider.of(item))
    rows = 2 * 8_192 * shape.sparse_layers * 8 * shape.hidden  # bfloat16, eight experts per token
    assert shards.of("activations") - wider.of("activations") == pytest.approx(rows)


def test_offloaded_state_moves_to_the_host() -> None:
    offloaded = replace(BASE, offload=1.0)
    assert allocated_items(SHAPE, offloaded).of("optimizer") == 0
    on_host = offload_items(SHAPE, offloaded).of("offloaded optimizer")
    pinned_bytes = offload_items(SHAPE, offloaded).of("pinned gradients")
    stages = [gradient_buffers(stage_parameters(SHAPE, offloaded, stage), offloaded) for stage in range(offloaded.pp)]
    assert pinned_bytes == pytest.approx(sum(stages) / len(stages))
    assert on_host / 3 < pinned_bytes < 2 * on_host / 3, "gradients have a third of the state's numbers"
    assert on_host == pytest.approx(allocated_items(SHAPE, BASE).of("optimizer"))
    assert offload_items(SHAPE, BASE).of("offloaded optimizer", "pinned gradients", "copies of weights") == 0


@pytest.mark.parametrize(
    ("vocab_size", "tp", "rows"), [(151_936, 8, 151_936), (151_937, 8, 152_064), (151_936, 3, 152_064)]
)
def test_the_vocabulary_is_padded_so_that_tp_divides_it(vocab_size: int, tp: int, rows: int) -> None:
    assert padded_vocabulary(vocab_size, tp) == rows
