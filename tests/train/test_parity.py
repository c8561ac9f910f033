"""Loss, gradient norm and every gradient equal HF transformers' on the same weights, in every layout.

float32, 4 layers, grouped-query attention, ragged packed rows, tied and untied embeddings, PPO loss with entropy at
temperature 0.7. Injected faults show that the comparison detects them.
"""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import batch, comparison, shard_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
UNTIED = ("dp2 pp2 vpp2", "tp2 pp2")  # output layer and embedding on different pipeline ranks
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {
        "tp2 sp": Layout(**SP),
        "tp2": Layout(tp=2),
        "pp2": Layout(pp=2),
        "dp2": Layout(dp=2),
        "dp2 plain optimizer": Layout(dp=2, distributed_optimizer=False),
        "cp2": Layout(cp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "pp2 uneven": Layout(pp=2, segments=(1, 3)),
    },
    4: {
        "tp2 pp2": Layout(pp=2, **SP),
        "tp2 cp2": Layout(cp=2, **SP),
        "dp2 cp2": Layout(dp=2, cp=2),
        "pp2 cp2": Layout(pp=2, cp=2),
        "dp2 pp2 vpp2": Layout(dp=2, pp=2, vpp=2),
        "dp2 pp2 vpp2 overlap": Layout(dp=2, pp=2, vpp=2, overlap_grad_reduce=True, bucket_size=5_000),
        "tp2 pp2 vpp2": Layout(pp=2, vpp=2, **SP),
        "pp2 cp2 vpp2": Layout(pp=2, cp=2, vpp=2),
    },
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
}
FAULTS = {
    "swapped_chunks": Layout(cp=2),
    "dropped_norm_reduction": Layout(**SP),
    "columns_of_one_rank": Layout(cp=2),
    "skipped_tp_reduction": Layout(**SP),
    "shifted_positions": Layout(pp=2),
    "denominator_per_micro_batch": Layout(dp=2),
}


def job(name: str, kind: str, layout: Layout, model: dict[str, Any] | None = None, fault: str | None = None) -> RankJob:
    return RankJob(name, "tests.train.parity:compare", (kind, layout, model or {}, fault))


def kinds_of(name: str) -> tuple[str, ...]:
    """Return the kinds of embeddings to test. On 4 ranks, untied ones are tested only in the layouts of ``UNTIED``."""
    return ("tied",) if name in LAYOUTS[4] and name not in UNTIED else ("tied", "untied")


JOBS = {
    size: [job(f"{name} {kind}", kind, layout) for name, layout in layouts.items() for kind in kinds_of(name)]
    for size, layouts in LAYOUTS.items()
}
JOBS[2] += [job(name, "tied", Layout(**SP), keys) for name, keys in RECOMPUTE.items()]
for size, names in {2: ("cp2", "pp2 vpp2"), 4: ("tp2 cp2", "dp2 cp2")}.items():
    JOBS[size] += [job(f"full recompute {n}", "tied", LAYOUTS[size][n], RECOMPUTE["full recompute"]) for n in names]
JOBS[2] += [job(fault, "tied", layout, fault=fault) for fault, layout in FAULTS.items()]
NAMES = [job.name for jobs in JOBS.values() for job in jobs if job.name not in FAULTS]


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts.values()])
def test_a_packed_row_of_one_sequence_is_compared_in_every_layout(layout: Layout) -> None:
    shards = [shard_of(batch(), layout, rank, join=True) for rank in range(layout.dp)]
    assert 1 in [len(row.cu_seqlens) - 1 for shard in shards for row in shard]
    assert sum(len(row.token_ids) for shard in shards for row in shard) == sum(len(row.token_ids) for row in batch())


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    errors = comparison(results, name)
    assert errors.worst <= BOUND, errors
    assert errors.score <= BOUND, errors


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_exceeds_the_bound(fault: str, results: Results) -> None:
    errors = comparison(results, fault)
    assert max(errors.worst, errors.score) > 100 * BOUND, errors
