"""Advice of the plan: idle devices and uninformative evaluations, with settings that fix them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.view import render_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from tests.config.machines import SERVER


@pytest.fixture
def plan(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    return partial(plan, machine=SERVER)


@pytest.mark.parametrize("tp", [1, 2])
def test_idle_gpus_of_the_shortest_command_are_named(plan, argv: list[str], tp: int) -> None:
    layout = f"parallel.tp={tp}"
    line = plan(layout).advice[0]
    assert line.startswith(
        f"{8 - tp} of 8 GPUs would idle: set placement.actor_num_gpus_per_node=8 rollout.num_engines=8"
    )
    fix = re.findall(r"[\w.]+=\d+", line)
    assert plan(layout, *fix).advice == ()
    cfg = load_config([*argv, layout])
    assert f"advice\n  {line}\n" in render_plan(cfg, make_plan(cfg, SERVER), SERVER)


def test_trainer_gpus_that_wait_for_one_engine_are_named(plan) -> None:
    (line,) = plan("placement.actor_num_gpus_per_node=8", "rollout.tp=2").advice
    assert "on 2 of the trainer's 8 GPUs" in line and line.endswith("set rollout.num_engines=4")


def test_other_modes_get_their_own_advice(plan) -> None:
    assert plan("run.mode=rollout_only").advice[0].startswith("7 of 8 GPUs would idle: set rollout.num_engines=8,")
    assert "raise rollout.num_engines" in plan("placement.mode=split").advice[0]
    few_samples = plan("rollout.batch_size=1", "rollout.n_samples_per_prompt=2", "placement.actor_num_gpus_per_node=2")
    assert "6 of 8 GPUs would idle: raise rollout.batch_size" in few_samples.advice[0]


THREE = ("rollout.num_managers=3", "rollout.batch_size=12")


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (("run.mode=rollout_only", "rollout.num_engines=3"), "rollout.num_engines=6,"),
        (("run.mode=rollout_only", "rollout.num_engines=6"), "rollout.num_engines=8, and rollout.num_managers to a"),
        (("placement.actor_num_gpus_per_node=8", "rollout.num_engines=3"), "rollout.num_engines=6"),
        (
            ("placement.actor_num_gpus_per_node=4", "rollout.num_engines=3"),
            "placement.actor_num_gpus_per_node=8 rollout.num_engines=6,",
        ),
        (
            ("placement.actor_num_gpus_per_node=4", "parallel.tp=4", "rollout.tp=1", "rollout.num_engines=3"),
            "placement.actor_num_gpus_per_node=8 rollout.num_engines=6,",
        ),
    ],
)
def test_the_suggested_number_of_engines_is_a_multiple_of_the_managers(
    plan, overrides: tuple[str, ...], fix: str
) -> None:
    assert f" set {fix}" in plan(*THREE, *overrides).advice[0]


def test_engines_that_leave_gpus_over_need_another_size(plan) -> None:
    six = replace(SERVER, num_gpus=6, gpu_names=("H100",) * 6)
    sizes = ("run.mode=rollout_only", "rollout.tp=4", "rollout.num_engines=1")
    assert plan(*sizes, machine=six).advice[0].startswith("2 of 6 GPUs would idle: set rollout.tp to a divisor of 6,")


@pytest.mark.parametrize(
    ("managers", "fix"),
    [("2", "rollout.num_engines=2"), ("4", "rollout.num_engines=3 rollout.num_managers=1")],
)
def test_fewer_engines_that_fit_are_a_multiple_of_the_managers(plan, managers: str, fix: str) -> None:
    settings = (f"rollout.num_managers={managers}", "rollout.num_engines=4", "rollout.batch_size=12")
    trainer = "placement.actor_num_gpus_per_node=3"
    with pytest.raises(ConfigError, match=rf"set {re.escape(fix)}, placement"):
        plan(*settings, trainer)
    assert plan(*settings, trainer, *fix.split()).engines


def test_no_advice_for_unknown_or_fully_used_devices(plan) -> None:
    assert plan(machine=Machine(0, 2, 16 * 2**30, ())).advice == ()
    assert plan("placement.ray_address=10.0.0.1:6379").advice == ()


@pytest.mark.parametrize("greedy", ["evaluation.temperature=0", "evaluation.overrides.held.top_k=1"])
def test_equal_samples_of_an_evaluation_are_named(plan, data: Path, greedy: str) -> None:
    settings = ("placement.actor_num_gpus_per_node=8", "rollout.num_engines=8", f"evaluation.datasets.held={data}")
    four = (*settings, "evaluation.n_samples_per_prompt=4")
    sampled = () if greedy.startswith("evaluation.temperature") else ("evaluation.temperature=1.0",)
    (line,) = plan(*four, *sampled, greedy).advice
    assert "evaluation of held draws 4 samples per prompt" in line and "pass@4 equals pass@1" in line
    assert plan(*four, "evaluation.temperature=1.0").advice == ()
    assert plan(*settings).advice == ()


def test_an_interval_without_datasets_is_named(plan) -> None:
    line = plan("evaluation.interval=5").advice[-1]
    assert line.startswith("evaluation.interval=5 evaluates nothing") and "evaluation.datasets.heldout=" in line
