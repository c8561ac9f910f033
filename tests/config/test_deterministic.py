"""``run.deterministic``: the values it sets, and the settings it refuses because the bits would differ."""

from __future__ import annotations

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError

LAPTOP = Machine(0, 8, 16 * 2**30, ())
SERVER = Machine(8, 64, 512 * 2**30, ("H100",) * 8)
ON = "run.deterministic=true"


def test_a_laptop_gets_one_thread_and_a_gate_of_zero(argv: list[str]) -> None:
    plan = make_plan(load_config([*argv, ON]), LAPTOP)
    assert (plan.trainer_threads, plan.engine_threads, plan.tolerances.probe, plan.actor.sample_tolerance) == (
        1,
        1,
        0.0,
        0.0,
    )
    assert plan.actor.deterministic and all(engine.deterministic for engine in plan.engines)


def test_data_and_pipeline_parallelism_keep_the_bits(argv: list[str]) -> None:
    plan = make_plan(load_config([*argv, ON, "parallel.pp=2", "placement.actor_num_gpus_per_node=4"]), LAPTOP)
    assert (plan.actor.layout.pp, plan.actor.layout.dp) == (2, 2)


def test_a_gpu_keeps_its_tolerance_and_may_split_tensors(argv: list[str]) -> None:
    plan = make_plan(load_config([*argv, ON, "parallel.tp=2"]), SERVER)
    assert plan.tolerances.probe == 0.15
    assert plan.actor.deterministic


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.tp=2", r"parallel\.tp=2 with run\.deterministic=true on a CPU: .*set parallel\.tp=1"),
        ("rollout.tp=2", r"rollout\.tp=2 with run\.deterministic=true on a CPU: .*set rollout\.tp=1"),
        ("model.dtype=bfloat16", r"model\.dtype=bfloat16 with run\.deterministic=true on a CPU: .*float32"),
        ("model.cpu_kernels=c", r"model\.cpu_kernels=c with run\.deterministic=true: .*set model\.cpu_kernels=auto"),
        (
            "rollout.cpu_kernels=c",
            r"rollout\.cpu_kernels=c with run\.deterministic=true: .*set rollout\.cpu_kernels=auto",
        ),
        (
            "+rollout.sglang.speculative_algorithm=NGRAM",
            r"speculative_algorithm=NGRAM .*ignores the samples' seeds.*remove speculative_algorithm",
        ),
        ("weights.probe_tolerance=1e-4", r"weights\.probe_tolerance=0\.0001 .* must agree bitwise"),
        ("weights.sample_tolerance=inf", r"weights\.sample_tolerance=inf .* must agree bitwise"),
    ],
)
def test_settings_that_change_bits_are_refused(argv: list[str], override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(load_config([*argv, ON, override]), LAPTOP)
