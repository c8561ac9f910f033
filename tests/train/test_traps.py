"""Known traps of megatron-core 0.19.2: closed here, and shown to be there still, so that a patch can go when they are not.

Selective recompute without TransformerEngine and the checkpoint's result queue are also met in test_parity
(``selective recompute``) and test_checkpoint (``a save leaves no process behind``).
"""

from __future__ import annotations

import pytest

from tests.train.jobs import Job, Results

pytestmark = [pytest.mark.ranks, pytest.mark.upstream]

JOBS = {
    1: [
        Job("adamw", "tests.train.traps:resume_with_torch_adamw"),
        Job("touch ups", "tests.train.traps:host_touch_ups"),
        Job("lone replica", "tests.train.traps:lone_replica"),
        Job("cross entropy", "tests.train.traps:fused_cross_entropy"),
        Job("decay", "tests.train.traps:decay"),
        Job("refused", "tests.train.traps:refused"),
    ],
    2: [
        Job("pipeline shapes", "tests.train.traps:pipeline_shapes"),
        Job("unmarked experts", "tests.train.traps:unmarked_experts"),
    ],
}


def test_adamw_resumes_where_torch_adamw_does_not(results: Results) -> None:
    (found,) = results["adamw"]
    assert found["ours"] == "ok"
    assert found["torch AdamW"] in ("AssertionError", "ArithmeticError")  # refused, or another run


def test_each_touch_up_replaces_something_that_fails_here(results: Results) -> None:
    (found,) = results["touch ups"]
    assert found["clip"] == "AssertionError"
    assert found["rng"] != "ok"
    assert found["recompute"] == "NameError"
    assert found["recompute with the patch"] == "ok"
    assert found["imported"] == "megatron.core.timers", "and not wandb with it"


def test_a_lone_replica_exchanges_nothing_with_itself(results: Results) -> None:
    (found,) = results["lone replica"]
    assert found["ours"] == (found["upstream"][0], 0)
    assert found["upstream"][1] == 2  # gradients and weights


def test_the_optimizer_of_experts_is_read_in_another_layout(results: Results) -> None:
    for found in results["unmarked experts"]:
        assert found["ours"] == "ok"
        assert found["upstream"] == "CheckpointError"


def test_shapes_between_two_virtual_stages_keep_their_direction(results: Results) -> None:
    for rank, found in enumerate(results["pipeline shapes"]):
        assert found["ours"] == ([2 - rank, 1, 8], [12 - rank, 1, 8])  # the other's "to the next", "to the previous"
        assert found["upstream"] == ([12 - rank, 1, 8], [2 - rank, 1, 8])


def test_logit_gradients_are_not_rounded_to_bfloat16(results: Results) -> None:
    (found,) = results["cross entropy"]
    assert found["ours"] < 1e-6
    assert found["fused"] > 1e-4


def test_norms_do_not_decay(results: Results) -> None:
    (found,) = results["decay"]
    assert found["norm"] == (1.0, 1.0)
    assert found["matrix"] == pytest.approx((0.995, 0.995), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown field", "ConfigError: model.megatron.layernorm_epsilom is no field"),
        ("unusable field", "ConfigError: model/parallel: megatron-core refuses"),
        ("derived field", "ConfigError: model.megatron.attention_dropout=0.1: this field follows from"),
        ("warm-up", "ConfigError: optim.warmup_steps=10 leaves none of 10 optimizer steps"),
        ("ref_checkpoint", "CheckpointError: model.ref_checkpoint=/no/such/folder: no such folder"),
    ],
)
def test_a_spec_that_cannot_be_built_names_its_key(name: str, message: str, results: Results) -> None:
    (found,) = results["refused"]
    assert found[name].startswith(message)
