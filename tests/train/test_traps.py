"""Faults of megatron-core 0.19.2 that are fixed here. If a test fails because upstream has fixed one, remove the patch.

The last two tests are about no fault and no patch: norms do not decay, and an error of the trainer names its key.
test_parity (selective recompute without TransformerEngine) and test_checkpoint (the result queue) cover two more.
"""

from __future__ import annotations

import pytest

from tests.train.jobs import RankJob, Results

pytestmark = [pytest.mark.ranks, pytest.mark.upstream]

JOBS = {
    1: [
        RankJob("adamw", "tests.train.traps:resume_with_torch_adamw"),
        RankJob("cpu patches", "tests.train.traps:cpu_patches"),
        RankJob("lone replica", "tests.train.traps:lone_replica"),
        RankJob("cross entropy", "tests.train.traps:fused_cross_entropy"),
        RankJob("decay", "tests.train.traps:decay"),
        RankJob("refused", "tests.train.traps:refused"),
    ],
    2: [
        RankJob("pipeline shapes", "tests.train.traps:pipeline_shapes"),
        RankJob("unmarked experts", "tests.train.traps:unmarked_experts"),
    ],
}


def test_adamw_resumes_where_torch_adamw_does_not(results: Results) -> None:
    (outcomes,) = results["adamw"]
    assert outcomes["ours"] == "ok"
    assert outcomes["torch AdamW"] in ("AssertionError", "ArithmeticError")  # an error, or a run that differs


def test_each_cpu_patch_replaces_code_that_fails_on_a_cpu(results: Results) -> None:
    (outcomes,) = results["cpu patches"]
    assert outcomes["clip"] == "AssertionError"
    assert outcomes["rng"] != "ok"
    assert outcomes["recompute"] == "NameError"
    assert outcomes["recompute with the patch"] == "ok"
    assert outcomes["imported"] == "megatron.core.timers", "wandb is not imported"


def test_a_lone_replica_exchanges_nothing_with_itself(results: Results) -> None:
    (runs,) = results["lone replica"]
    assert runs["ours"] == (runs["upstream"][0], 0)
    assert runs["upstream"][1] == 2  # gradients and weights


def test_the_optimizer_of_experts_can_be_loaded_in_another_layout(results: Results) -> None:
    for outcomes in results["unmarked experts"]:
        assert outcomes["ours"] == "ok"
        assert outcomes["upstream"] == "CheckpointError"


def test_shapes_between_two_virtual_stages_keep_their_direction(results: Results) -> None:
    for rank, shapes in enumerate(results["pipeline shapes"]):
        assert shapes["ours"] == (
            [2 - rank, 1, 8],
            [12 - rank, 1, 8],
        )  # the shapes that the other rank sent to its next and to its previous rank
        assert shapes["upstream"] == ([12 - rank, 1, 8], [2 - rank, 1, 8])


def test_logit_gradients_are_not_rounded_to_bfloat16(results: Results) -> None:
    (errors,) = results["cross entropy"]
    assert errors["ours"] < 1e-6
    assert errors["fused"] > 1e-4


def test_norms_do_not_decay(results: Results) -> None:
    (factors,) = results["decay"]
    assert factors["norm"] == (1.0, 1.0)
    assert factors["matrix"] == pytest.approx((0.995, 0.995), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown field", "ConfigError: model.megatron.layernorm_epsilom is not a field"),
        ("unusable field", "ConfigError: megatron-core rejects the values of parallel.* or model.megatron.*"),
        ("derived field", "ConfigError: model.megatron.attention_dropout=0.1: this field is derived from"),
        ("warm-up", "ConfigError: optim.warmup_steps=10 leaves none of 10 optimizer steps"),
        ("ref_checkpoint", "CheckpointError: model.ref_checkpoint=/no/such/folder: no such folder"),
    ],
)
def test_a_spec_that_cannot_be_built_names_its_key(name: str, message: str, results: Results) -> None:
    (errors,) = results["refused"]
    assert errors[name].startswith(message)
