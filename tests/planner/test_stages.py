"""Pipeline stages of a trainer: the stage that needs most memory; and critics and teachers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_like.planner.models import find_shape
from slime_like.planner.trainer import (
    SCORING,
    VALUE,
    TrainerSettings,
    allocated_items,
    layer_bytes,
    stage_items,
    stage_parameters,
    trainer_memory,
)

SHAPE = find_shape("MODEL", "Qwen3-4B")
BASE = TrainerSettings(pp=4, dp=2)


def test_each_stage_keeps_its_own_layers_and_fewer_micro_batches_than_the_one_before() -> None:
    per_layer = BASE.tokens * layer_bytes(SHAPE, BASE, "attention", sparse=False)
    for stage in range(4):
        assert stage_items(SHAPE, BASE, stage).of("activations") == pytest.approx((4 - stage) * 9 * per_layer)
    two = replace(BASE, num_micro_batches=2)
    assert [stage_items(SHAPE, two, stage).of("activations") / per_layer for stage in range(4)] == [18, 18, 18, 9]


def test_the_output_layer_is_on_the_last_stage_alone_and_the_largest_stage_is_named() -> None:
    stages = [stage_items(SHAPE, BASE, stage) for stage in range(4)]
    assert [bool(table.of("output layer")) for table in stages] == [False, False, False, True]
    totals = [table.total for table in stages]
    assert allocated_items(SHAPE, BASE).total == max(totals) == totals[0]
    assert trainer_memory(SHAPE, BASE).place == "pipeline stage 1 of 4"
    long = replace(BASE, num_micro_batches=1, logits_chunk=BASE.tokens)
    assert trainer_memory(SHAPE, long).place == "pipeline stage 4 of 4"
    assert trainer_memory(SHAPE, replace(BASE, pp=1)).place == ""


@pytest.mark.parametrize("name", ["Qwen3-4B", "Qwen3-30B-A3B", "Qwen3-8B"])
@pytest.mark.parametrize("tp", [1, 2])
def test_stages_hold_every_parameter_once_and_a_tied_table_twice(name: str, tp: int) -> None:
    shape = find_shape("MODEL", name)
    settings = TrainerSettings(tp=tp, pp=4, segments=(7, 10, 10, len(shape.layers) - 27))
    parts = [stage_parameters(shape, settings, stage).total for stage in range(4)]
    one_stage = stage_parameters(shape, TrainerSettings(tp=tp), 0).total
    tied_copy = shape.embedding_parameters / tp if shape.tied else 0
    assert sum(parts) == pytest.approx(one_stage + tied_copy, rel=1e-3)


def test_recompute_by_block_keeps_the_other_layers() -> None:
    full = TrainerSettings(recompute="full")
    activations = [
        allocated_items(SHAPE, replace(full, recompute_method="block", recompute_layers=n)).of("activations")
        for n in (1, 18, 36)
    ]
    assert activations[0] > activations[1] > activations[2] == allocated_items(SHAPE, full).of("activations")


def test_a_critic_has_no_logits_and_a_teacher_nothing_to_train() -> None:
    policy = TrainerSettings()
    critic, teacher = (trainer_memory(SHAPE, replace(policy, task=task)) for task in (VALUE, SCORING))
    assert critic.of("output layer") == 0 < critic.of("value head") < trainer_memory(SHAPE, policy).of("output layer")
    assert critic.of("weights") == pytest.approx(2 * SHAPE.parameters, rel=1e-3)
    assert teacher.of("gradients", "optimizer", "activations") == 0


@pytest.mark.parametrize("change", [{"task": SCORING}, {"task": VALUE}, {"offload": 1.0}])
def test_the_allocators_overhead_is_of_the_tensors_on_the_device(change: dict[str, object]) -> None:
    settings = replace(TrainerSettings(), **change)  # pyright: ignore[reportArgumentType]
    items = allocated_items(SHAPE, settings)
    assert trainer_memory(SHAPE, settings).of("allocator") == pytest.approx(0.07 * items.total)
