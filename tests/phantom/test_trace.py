"""Traced memory of trainer ranks: the planner agrees within 10 %, shipped recipes fit, and ``--plan --trace`` prints both."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from slime_like.cluster.plan import trace as trace_module
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.phases import FIXED
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.schema.names import FAMILIES
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from slime_like.phantom import build
from slime_like.planner.models import table_config
from slime_like_compat.flags.translate import translate
from tests.config.test_recipes import MACHINES
from tests.phantom.forks import trainer_forks
from tests.phantom.trace_checks import TraceCase, check_recipe
from tests.train.jobs import SP

DENSE, SPARSE, HYBRID = "Qwen3-4B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B"
TP2 = Layout(dp=4, **SP)
EP8 = Layout(dp=4, ep=8, **SP)
PP2 = Layout(dp=2, pp=2, **SP)
LAYOUTS = {
    "dense": TraceCase(DENSE, 4, TP2),
    "dense, recompute": TraceCase(DENSE, 4, TP2, recompute="full", chunk=1_024),
    "dense, cp": TraceCase(DENSE, 4, Layout(cp=2, dp=2, **SP)),
    "dense, offload": TraceCase("Qwen3-0.6B", 4, TP2, offload=1.0),
    "dense, half offloaded": TraceCase(DENSE, 4, Layout(**SP), offload=0.5),
    "dense, first stage": TraceCase(DENSE, 4, PP2, num_micro_batches=4),
    "dense, last stage": TraceCase(DENSE, 4, PP2, rank=7, num_micro_batches=4),
    "dense, virtual stages": TraceCase(DENSE, 4, Layout(dp=2, pp=2, vpp=2, **SP), num_micro_batches=4),
    "experts": TraceCase(SPARSE, 2, EP8),
    "experts, recompute": TraceCase(SPARSE, 2, Layout(dp=8, ep=8), recompute="full"),
    "hybrid with experts": TraceCase(HYBRID, 4, EP8, tokens=4_096),
}
FAMILY_CASES = {  # published shapes of the families of which ``LAYOUTS`` has no model
    **{name: TraceCase(name, 2, TP2) for name in ("Qwen2.5-7B", "Llama-3.1-8B", "MiMo-7B", "GLM-4-9B-0414")},
    **{name: TraceCase(name, 2, EP8) for name in ("GLM-4.5-Air", "MiniMax-M2", "DeepSeek-V2-Lite", "Kimi-K2")},
    "DeepSeek-V3": TraceCase("DeepSeek-V3", 4, EP8),
    "Qwen3.5-0.8B": TraceCase("Qwen3.5-0.8B", 4, TP2, tokens=4_096),
    "Qwen3.5-35B-A3B": TraceCase("Qwen3.5-35B-A3B", 4, EP8, tokens=4_096),
}
MACHINE = "8xH100"
FAST = ("qwen3_4b_gsm8k", "qwen3_4b_dapo", "qwen3_4b_dapo_async", "qwen3_30b_a3b", "one_gpu", "one_gpu_gdn")
NIGHTLY = (
    "qwen3_4b_gsm8k_async",
    "qwen3_5_35b_a3b",
    "qwen3_next_80b_a3b",
    "qwen3_235b_a22b",
    "deepseek_r1",
)
RECIPES = {name: MACHINES[name] for name in FAST}  # recipe -> machine
NIGHTLY_RECIPES = {name: MACHINES[name] for name in NIGHTLY}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, scratch = "tests.phantom.trace_checks:trace_all", tmp_path_factory.mktemp("traced")
    environment = trace_module.TRACED_GPU.environment()
    cases = LAYOUTS | FAMILY_CASES
    return trainer_forks().run(target, scratch, cases, RECIPES, environment=environment, seconds=600)


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*LAYOUTS, *FAMILY_CASES])
def test_the_planner_agrees_with_a_trace(name: str, traced: dict[str, Any]) -> None:
    result = traced[name]
    assert result["planned"] / result["traced"] == pytest.approx(1, abs=0.1), result
    assert result["build"] == pytest.approx(1, abs=0.1), result
    assert result["weights"] == pytest.approx(1, abs=1e-4)
    assert result["gradients"] == pytest.approx(1, abs=1e-4)
    assert result["main memory planned"] == pytest.approx(result["main memory traced"], rel=0.1, abs=64 << 20)


def test_every_family_is_traced_at_a_published_shape() -> None:
    kinds = {str((table_config(case.model) or {})["model_type"]) for case in (LAYOUTS | FAMILY_CASES).values()}
    text_parts = {kind for kind in FAMILIES if kind.removesuffix("_text") in kinds - {kind}}
    assert kinds | text_parts == FAMILIES.keys()


@pytest.mark.ranks
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_their_hardware(name: str, traced: dict[str, Any]) -> None:
    check_recipe(name, traced[name])


def test_every_recipe_with_a_trainer_is_traced() -> None:
    plans = {
        name: make_plan(load_config([f"+recipe={name}"], files=False, machine=False), described_machine(machine))
        for name, machine in MACHINES.items()
    }
    assert {*FAST, *NIGHTLY} == {name for name, plan in plans.items() if plan.needs_trainer}


TRACE: dict[str, Any] = {
    "stage": 0,
    "weights": 4 << 30,
    "gradients": 8 << 30,
    "optimizer": 6 << 30,
    "pinned": 20 << 30,
    "pageable": 1 << 30,
    "phases": [
        {"name": "build", "allocated": 15 << 30, "reserved": 16 << 30},
        {"name": "step", "allocated": 23 << 30, "reserved": 25 << 30},
        {"name": "transfer", "allocated": 9 << 30, "reserved": 10 << 30},
        {"name": "push", "allocated": 8 << 30, "reserved": 9 << 30},
        {"name": "collect", "allocated": 0, "reserved": 1 << 29},
    ],
    "num_micro_batches": 2,
    "length": 1_536,
    "note": "",
}
ARGV = ["+recipe=qwen3_4b_gsm8k"]


def test_a_plan_shows_the_trace_beside_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "run_trace", lambda argv, machine: [TRACE])
    lines = show_plan(ARGV, MACHINE, trace=True).partition("\ntrace ")[2].splitlines()
    assert lines[0].endswith("2 micro-batches of 16,384 tokens in sequences of 1,536")
    rows = [" ".join(line.split()) for line in lines[1:]]
    assert rows[0] == "traced planned"
    assert rows[1].startswith("weights 4.0 GiB 3.7 GiB")
    assert rows[4].startswith("activations and temporary 5.0 GiB")
    assert rows[5].startswith("peak of a step 23.0 GiB 22.6 GiB planner -")
    assert rows[6].startswith("peak of the build 15.0 GiB 15.0 GiB planner -")
    assert rows[7].startswith("peak at the end of a push 8.0 GiB 8.1 GiB planner +")
    assert rows[8].startswith("main memory 21.0 GiB 18.5 GiB planner -")
    assert "step 23.0 GiB (reserved 25.0 GiB)" in rows[9]
    assert rows[10].endswith("of 79.6 GiB: fits") and "push 71." in rows[10]


def test_a_trace_that_does_not_fit_its_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [
        phase | {"reserved": phase["reserved"] + (9 << 30) * (phase["name"] == "push")} for phase in TRACE["phases"]
    ]
    monkeypatch.setattr(trace_module, "run_trace", lambda argv, machine: [TRACE | {"phases": phases}])
    assert show_plan(ARGV, MACHINE, trace=True).endswith("of 79.6 GiB: does not fit\n")


def test_a_build_that_does_not_fit_its_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The larger of build and step must fit: engines and other roles have the same memory during both."""
    phases = [
        phase | {"reserved": phase["reserved"] + (90 << 30) * (phase["name"] == "build")} for phase in TRACE["phases"]
    ]
    monkeypatch.setattr(trace_module, "run_trace", lambda argv, machine: [TRACE | {"phases": phases}])
    assert show_plan(ARGV, MACHINE, trace=True).endswith("of 79.6 GiB: does not fit\n")


def test_a_trainer_that_stays_on_its_gpu_keeps_its_memory_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engines release their memory; the trace then has no phases in which the trainer's state is in main memory."""
    phases = [phase for phase in TRACE["phases"] if phase["name"] in ("build", "step", "transfer")]
    monkeypatch.setattr(trace_module, "run_trace", lambda argv, machine: [TRACE | {"phases": phases}])
    argv = [
        *ARGV,
        "placement.offload_train=false",
        "placement.offload_rollout=true",
        "rollout.sglang.mem_fraction_static=0.5",
    ]
    plan = make_plan(load_config(argv, files=False, machine=False), described_machine(MACHINE))
    totals = trace_module.gpu_totals(plan, TRACE | {"phases": phases})
    assert {"collect", "step", "push", "transfer"} == totals.keys()
    assert min(totals[name] for name in ("collect", "step", "push")) > 25 << 30, "torch has reserved 25 GiB"
    assert "collect" in show_plan(argv, MACHINE, trace=True).splitlines()[-1]


def test_a_critic_on_the_trainers_gpu_counts_if_engines_are_on_busier_gpus() -> None:
    argv = [
        *ARGV,
        "algo=ppo",
        "critic.placement=colocated",
        "placement.mode=split",
        "placement.offload_train=false",
        "placement.offload_rollout=false",
        "placement.actor_num_gpus_per_node=4",
        "rollout.num_engines=2",
    ]
    plan = make_plan(load_config(argv, files=False, machine=False), described_machine(MACHINE))
    tables = dict(plan.memory.tables)
    assert plan.memory.busiest == ("engine",), "the case needs engines that take more memory than trainer and critic"
    expected = (25 << 30) + tables["trainer"].of(*FIXED) + tables["critic"].total
    assert trace_module.gpu_totals(plan, TRACE) == {"": pytest.approx(expected)}


def test_a_trace_needs_a_plan() -> None:
    assert translate(["--plan-for", MACHINE, "--trace"]).trace
    with pytest.raises(ConfigError, match=r"--trace needs a plan: add --plan"):
        translate(["--trace", "+recipe=quickstart"])


def test_a_plan_on_a_cpu_has_no_trace() -> None:
    with pytest.raises(ConfigError, match=r"--trace runs a step .* no trainer on GPUs.*--plan-for"):
        show_plan(["+recipe=quickstart", "placement.device=cpu"], trace=True)


@pytest.fixture
def compiled() -> None:
    """Compile the phantom GPU, which a trace does first, before the test replaces ``subprocess.run``."""
    build.library()


@pytest.mark.usefixtures("compiled")
def test_a_failed_trace_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 2, "", "warning\nconfig error: no config.json\n")
    monkeypatch.setattr(trace_module.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"the trace failed: config error: no config\.json"):
        trace_module.run_trace(ARGV, MACHINE)


@pytest.mark.usefixtures("compiled")
def test_a_late_trace_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("trace", timeout)

    monkeypatch.setattr(trace_module.subprocess, "run", late)
    with pytest.raises(ConfigError, match=r"took more than .* SLIME_LIKE_DEADLINE_FACTOR"):
        trace_module.run_trace(ARGV, MACHINE)
