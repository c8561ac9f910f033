"""Main memory of offloaded ranks: compared with traces, and pinned buffers by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.planner import offload as offload_module
from slime_like.planner.constants import MIB
from slime_like.planner.models import find_shape
from slime_like.planner.offload import gradient_buffers, offload_items
from slime_like.planner.trainer import BUILD, RankParameters, TensorGroup, TrainerSettings

# Layouts of recipes, and the bytes on the host that ``--trace`` counts for a rank, pinned and pageable.
TRACED = {
    "Qwen3.5-35B-A3B": (TrainerSettings(tp=2, cp=4, ep=8, offload=1.0), False, 69_479_710_720),
    "Qwen3-30B-A3B": (TrainerSettings(tp=4, dp=2, ep=8, offload=1.0), True, 74_326_241_280),
}


@pytest.mark.parametrize("model", TRACED)
def test_offloaded_state_takes_as_much_memory_as_in_a_trace(model: str) -> None:
    settings, in_rollouts, traced = TRACED[model]
    table = offload_items(find_shape("MODEL", model), settings, in_rollouts=in_rollouts)
    assert table.total - table.of("processes", "checkpoint", BUILD) == pytest.approx(traced, rel=0.02)


@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3-Next-80B-A3B", "DeepSeek-V2-Lite"])
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("offload", [0.0, 1.0])
@pytest.mark.parametrize(
    "layout",
    [
        TrainerSettings(dp=4),
        TrainerSettings(dp=4, cp=2),
        TrainerSettings(dp=8, ep=8),
        TrainerSettings(tp=2, cp=4, ep=8),
        TrainerSettings(tp=2, dp=4, ep=2, etp=2),
        TrainerSettings(tp=2, pp=3, dp=2),
    ],
    ids=["dp", "dp and cp", "ep", "tp, cp and ep", "ep and etp", "pp"],
)
def test_all_ranks_together_save_each_parameter_once(
    model: str, layout: TrainerSettings, offload: float, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts have fewer replicas than divided tensors, and tensors that tensor parallelism does not divide have more."""
    # Buffers without rounding.
    monkeypatch.setattr(offload_module, "gradient_buffers", lambda parameters, s: 4 * parameters.shard(s))
    shape = find_shape("MODEL", model)
    settings = replace(layout, offload=offload, distributed_optimizer=distributed)
    saved_bytes = offload_items(shape, settings).of("checkpoint") * settings.world_size
    assert saved_bytes == pytest.approx((2 + 12) * shape.parameters, rel=1e-9)


def test_a_gradients_buffer_is_the_power_of_two_above_its_size() -> None:
    """Experts of Qwen3.5-35B-A3B have such sizes already; those of Qwen3-30B-A3B take a third more."""
    pairs = RankParameters((), (), (TensorGroup(2 * MIB, 10), TensorGroup(MIB, 10)))
    assert gradient_buffers(pairs, TrainerSettings()) == 10 * (8 + 4) * MIB
    larger = RankParameters((), (), (TensorGroup(3 * MIB, 10), TensorGroup(1.5 * MIB, 10)))
    assert gradient_buffers(larger, TrainerSettings()) == 10 * (16 + 8) * MIB
    assert gradient_buffers(RankParameters((TensorGroup(3 * MIB, 0),), (), ()), TrainerSettings()) == 0


@given(st.lists(st.tuples(st.integers(1, 2**28), st.integers(1, 50)), min_size=1, max_size=20))
def test_buffers_of_one_shard_are_those_of_whole_tensors(groups: list[tuple[int, int]]) -> None:
    parameters = RankParameters(tuple(TensorGroup(size, count) for size, count in groups), (), ())
    rounded = sum(count * (1 << (4 * size - 1).bit_length()) for size, count in groups)
    assert gradient_buffers(parameters, TrainerSettings()) == rounded


@pytest.mark.parametrize("shards", [2, 8, 64])
def test_buffers_of_shards_agree_with_a_division_of_joined_tensors(shards: int) -> None:
    generator = random.Random(shards)
    sizes = [generator.randint(1, 2 ** generator.randint(10, 24)) for _ in range(2_000)]
    parameters = RankParameters(tuple(TensorGroup(size, 1) for size in sizes), (), ())
    planned = gradient_buffers(parameters, TrainerSettings(dp=shards))
    assert planned == pytest.approx(_buffers_of_parts(sizes, shards) / shards, rel=0.02)


def _buffers_of_parts(sizes: list[int], shards: int) -> int:
    """Return the total bytes of the buffers if joined tensors are cut at the boundaries of equal shards."""
    total, start, num_bytes = sum(sizes), 0, 0
    bounds = [total * shard // shards for shard in range(1, shards)]
    for size in sizes:
        cuts = [start, *(bound for bound in bounds if start < bound < start + size), start + size]
        num_bytes += sum(1 << (4 * (end - begin) - 1).bit_length() for begin, end in pairwise(cuts))
        start += size
    return num_bytes
