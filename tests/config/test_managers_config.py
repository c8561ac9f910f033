"""``rollout.num_managers``: it divides engines and prompts, and appears in the plan."""

from __future__ import annotations

from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import render_plan
from slime_like.config.load.loader import load_config
from tests.config.bad_input import each_rule, one_message
from tests.config.machines import LAPTOP

TWO = "rollout.num_managers=2 rollout.num_engines=2"
# extra arguments, then words that the message must contain
RULES = {
    "zero": ("rollout.num_managers=0", "rollout.num_managers=0", "above 0"),
    "fewer engines": (
        "rollout.num_managers=2",
        "rollout.num_engines=1 is not a multiple of rollout.num_managers=2",
        "set rollout.num_engines=2, or rollout.num_managers=1",
    ),
    "odd engines": (
        "rollout.num_managers=4 rollout.num_engines=6 rollout.batch_size=8",
        "rollout.num_engines=6 is not",
        "set rollout.num_engines=8, or rollout.num_managers=2",
    ),
    "prompts": (f"{TWO} rollout.batch_size=7", "rollout.batch_size=7 is not", "set rollout.batch_size=8, or"),
    "over-sampling": (
        f"{TWO} rollout.batch_size=8 rollout.over_sampling_batch_size=11",
        "rollout.over_sampling_batch_size=11 is not",
        "set rollout.over_sampling_batch_size=12, or rollout.num_managers=1",
    ),
}


@each_rule(RULES)
def test_sizes_that_cannot_be_shared_equally_are_refused(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


def test_the_plan_names_the_managers_of_a_run_with_several(argv: list[str]) -> None:
    for num_managers, expected in ((1, None), (2, "manager  2 x (2 engines, 16 prompts of a rollout)")):
        cfg = load_config([*argv, "rollout.num_engines=4", f"rollout.num_managers={num_managers}"])
        lines = [line.strip() for line in render_plan(cfg, make_plan(cfg, LAPTOP), LAPTOP).splitlines()]
        assert [line for line in lines if line.startswith("manager")] == ([] if expected is None else [expected])
