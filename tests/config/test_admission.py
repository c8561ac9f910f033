"""``rollout.max_running_requests``: a number, SGLang's choice, or admission by the free KV cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime_like.cluster.plan.planner import Plan
from slime_like.rollout.engine.environment import SGLANG_PLUGINS, child_environment
from tests.config.bad_input import each_rule, one_message, refusal
from tests.config.machines import SERVER

AUTO = "rollout.max_running_requests=auto"
# extra arguments, then words that the message must contain
RULES = {
    "zero": ("rollout.max_running_requests=0", "rollout.max_running_requests=0", "above 0"),
    "word": ("rollout.max_running_requests=all", "'all' is neither a number nor auto", "null"),
    "scaled estimate": (
        f"{AUTO} rollout.sglang.schedule_conservativeness=1.5",
        "rollout.sglang.schedule_conservativeness has no effect",
        "rollout.max_running_requests=null",
    ),
    "sglang's name": ("rollout.sglang.max_running_requests=8", "belongs to rollout.max_running_requests"),
}


@each_rule(RULES)
def test_nonsense_is_refused(case: tuple[str, ...], argv: list[str]) -> None:
    one_message(case, argv)


@pytest.mark.parametrize(("value", "limit"), [("null", None), ("8", 8), ("auto", None)])
def test_the_engine_gets_a_number_or_admits_by_its_cache(
    plan: Callable[..., Plan], value: str, limit: int | None
) -> None:
    run_plan = plan(f"rollout.max_running_requests={value}")
    (engine,) = run_plan.engines
    assert engine.max_running_requests == limit
    assert engine.admits_by_kv == (value == "auto")
    environment = child_environment(engine, "/scratch")
    plugins = environment[SGLANG_PLUGINS].split(",")
    assert "kv_usage" in plugins
    assert ("kv_admission" in plugins) == engine.admits_by_kv
    assert ("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION" in environment) == engine.admits_by_kv
    decision_keys = {decision.key for decision in run_plan.decisions}
    assert ("rollout.max_running_requests" in decision_keys) == engine.admits_by_kv


def test_the_engine_gets_the_limit_of_a_health_check(plan: Callable[..., Plan]) -> None:
    (engine,) = plan("health.timeout_s=40").engines
    assert engine.health_timeout_s == 40


def reason(run_plan: Plan) -> str:
    return next(d.reason for d in run_plan.decisions if d.key == "rollout.max_running_requests")


def test_the_plan_gives_the_capacity_and_the_concurrency_at_first(plan: Callable[..., Plan]) -> None:
    small = plan(AUTO, "rollout.max_response_len=100", "rollout.sglang.max_total_tokens=450")
    assert "of 450 tokens (rollout.sglang.max_total_tokens)" in reason(small)
    assert "100 tokens each, at most 4, until" in reason(small)
    on_gpu = plan(AUTO, "rollout.max_response_len=100", machine=SERVER)
    assert on_gpu.memory.engine is not None
    assert f"of {on_gpu.memory.engine.tokens} tokens (predicted)" in reason(on_gpu)


def test_a_cache_that_cannot_hold_one_response_is_refused(plan: Callable[..., Plan]) -> None:
    with refusal(["rollout.sglang.max_total_tokens=100", "rollout.max_response_len=100"]):
        plan(AUTO, "rollout.max_response_len=100", "rollout.sglang.max_total_tokens=100")
