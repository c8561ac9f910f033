"""Traced memory of trainer ranks: the planner agrees within 10 %, shipped recipes fit, and ``--plan --trace`` prints both."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from slime_like.cluster.plan import trace as trace_module
from slime_like.cluster.plan.view import show_plan
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from slime_like.phantom import build
from slime_like.phantom.device import PhantomGpu
from slime_like_compat.flags.translate import translate
from tests.phantom.trace_checks import TraceCase
from tests.train.jobs import SP
from tests.train.ranks import run_ranks

DENSE, SPARSE, HYBRID = "Qwen3-4B", "Qwen3-30B-A3B", "Qwen3-Next-80B-A3B"
TP2 = Layout(dp=4, **SP)
EP8 = Layout(dp=4, ep=8, **SP)
PP2 = Layout(dp=2, pp=2, **SP)
LAYOUTS = {
    "dense": TraceCase(DENSE, 4, TP2),
    "dense, recompute": TraceCase(DENSE, 4, TP2, recompute="full", chunk=1_024),
    "dense, cp": TraceCase(DENSE, 4, Layout(cp=2, dp=2, **SP)),
    "dense, offload": TraceCase("Qwen3-0.6B", 4, TP2, offload=1.0),
    "dense, first stage": TraceCase(DENSE, 4, PP2, num_micro_batches=4),
    "dense, last stage": TraceCase(DENSE, 4, PP2, rank=7, num_micro_batches=4),
    "experts": TraceCase(SPARSE, 2, EP8),
    "experts, recompute": TraceCase(SPARSE, 2, Layout(dp=8, ep=8), recompute="full"),
    "hybrid with experts": TraceCase(HYBRID, 4, EP8, tokens=4_096),
}
RECIPES = ("qwen3_4b_gsm8k", "qwen3_4b_dapo", "qwen3_4b_dapo_async")
MACHINE = "8xH100"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch, gpu = tmp_path_factory.mktemp("traced"), PhantomGpu(memory_bytes=1 << 40)
    target = "tests.phantom.trace_checks:trace_all"
    (out,) = run_ranks(target, 1, scratch, LAYOUTS, RECIPES, MACHINE, environment=gpu.environment())
    return out


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_planner_agrees_with_a_trace(name: str, traced: dict[str, Any]) -> None:
    result = traced[name]
    assert result["planned"] / result["traced"] == pytest.approx(1, abs=0.1), result
    assert result["weights"] == pytest.approx(1, abs=0.02)
    assert result["gradients"] == pytest.approx(1, abs=0.02)


@pytest.mark.ranks
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit_their_hardware(name: str, traced: dict[str, Any]) -> None:
    result = traced[name]
    assert result["traced"] < result["left"], f"{name}: {result}"
    phases = {key.partition(" ")[0] for key in result if key.endswith(" planned")}
    assert phases == ({"step"} if name.endswith("_async") else {"step", "push"})
    for phase in phases:
        assert result[f"{phase} planned"] / result[f"{phase} allocated"] == pytest.approx(1, abs=0.1), phase


TRACE: dict[str, Any] = {
    "stage": 0,
    "weights": 4 << 30,
    "gradients": 8 << 30,
    "optimizer": 6 << 30,
    "phases": [
        {"name": "build", "allocated": 15 << 30, "reserved": 16 << 30},
        {"name": "step", "allocated": 23 << 30, "reserved": 25 << 30},
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
    assert rows[5].startswith("peak 23.0 GiB 22.6 GiB planner -")
    assert "step 23.0 GiB (reserved 25.0 GiB)" in rows[6]


def test_a_trace_that_does_not_fit_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = trace_module.probe_machine()
    monkeypatch.setattr(trace_module, "probe_machine", lambda: replace(machine, memory_bytes=24 << 30))
    with pytest.raises(ConfigError, match=r"optim\.cpu_offload=true needs 63\.\d GiB of this machine's main memory"):
        show_plan(["+recipe=qwen3_30b_a3b"], MACHINE, trace=True)


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
