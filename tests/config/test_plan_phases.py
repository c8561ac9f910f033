"""The planned memory of a GPU by phase of the loop, with ``placement.offload_train`` and ``placement.offload_rollout``."""

from __future__ import annotations

import re

import pytest

from slime_like.cluster.plan.remedies import OFFLOAD_KEYS
from slime_like.cluster.plan.view import show_plan
from slime_like.errors import ConfigError
from slime_like.planner.engine import WEIGHT_ITEMS
from tests.config.recipe_plans import OFFLOAD, RESIDENT, plan


def test_a_gpu_needs_the_memory_of_its_largest_phase() -> None:
    resident = plan("qwen3_4b_gsm8k").memory
    memory = plan("qwen3_4b_gsm8k", *OFFLOAD).memory
    trainer, engine = (dict(memory.tables)[role] for role in ("trainer", "engine"))
    phases = {phase.name: dict(phase.tables) for phase in memory.phases}
    resident_engine = dict(resident.tables)["engine"]
    assert resident.needed_bytes == trainer.total + resident_engine.total
    assert resident_engine.total - engine.total == 58 * 2**23, "graphs of prefill, which cannot be released"
    assert phases["collect"]["trainer"].total == trainer.of("CUDA context", "communicators")
    assert phases["collect"]["engine"] == engine == phases["push"]["engine"]
    assert phases["step"] == {"trainer": trainer, "engine": phases["step"]["engine"]}
    assert phases["step"]["engine"].total == engine.of("CUDA context", "communicators")
    assert phases["push"]["trainer"].of("weights") == trainer.of("weights")
    assert phases["push"]["trainer"].of("gradients", "optimizer") == 0
    save_phase = phases["save"]
    assert save_phase["trainer"].of("weights", "optimizer") == trainer.of("weights", "optimizer")
    assert (
        save_phase["engine"].of(*WEIGHT_ITEMS) == engine.of(*WEIGHT_ITEMS)
        and save_phase["engine"].of("KV cache", "CUDA graphs") == 0
    )
    assert memory.peak.name == "push" and memory.needed_bytes == sum(t.total for t in phases["push"].values())
    assert memory.needed_bytes < resident.needed_bytes - 10 * 2**30
    assert memory.host is not None and resident.host is not None
    host_bytes = memory.host.total - resident.host.total
    assert host_bytes > 8 * trainer.of("weights", "optimizer")


def test_an_engine_keeps_flashinfers_workspace_in_every_phase() -> None:
    """SGLang allocates it outside the regions that its memory saver releases."""
    plain, flashinfer = (
        {phase.name: dict(phase.tables)["engine"] for phase in plan("qwen3_4b_gsm8k", *OFFLOAD, *keys).memory.phases}
        for keys in ((), ("+rollout.sglang.attention_backend=flashinfer",))
    )
    assert {name: flashinfer[name].total - plain[name].total for name in plain} == dict.fromkeys(plain, 2**29)


@pytest.mark.parametrize(("key", "phase"), [(OFFLOAD[0], "step"), (OFFLOAD[1], "push")])
def test_one_side_that_stays_counts_in_every_phase(key: str, phase: str) -> None:
    memory, both = plan("qwen3_4b_gsm8k", key).memory, plan("qwen3_4b_gsm8k", *OFFLOAD).memory
    tables = dict(memory.tables)
    side = "engine" if key is OFFLOAD[0] else "trainer"
    assert all(dict(p.tables)[side] == tables[side] for p in memory.phases)
    assert memory.needed_bytes > both.needed_bytes
    assert sum(table.total for table in tables.values()) == next(p for p in memory.phases if p.name == phase).total


def test_released_communicators_are_not_counted_in_rollouts() -> None:
    resident, destroyed = (
        plan("qwen3_4b_gsm8k", *OFFLOAD, *keys).memory.phases for keys in ((), ("guard.release=true",))
    )
    collect = dict(resident[0].tables)["trainer"]
    assert resident[0].total - destroyed[0].total == collect.of("communicators") > 0
    assert [phase.total for phase in resident[1:]] == [phase.total for phase in destroyed[1:]]


def test_a_plan_names_the_phase_that_needs_most() -> None:
    text = show_plan(["+recipe=qwen3_4b_gsm8k"], "8xH100")
    assert re.search(r"memory +[\d.]+ GiB of 79\.6 GiB on each GPU with trainer \+ engine in phase push", text)
    assert re.search(r"of a GPU by phase: collect [\d.]+ GiB, step [\d.]+ GiB, push [\d.]+ GiB, save [\d.]+ GiB", text)
    assert f"  {OFFLOAD_KEYS} " not in text and f"  {OFFLOAD_KEYS} " in show_plan(
        ["+recipe=qwen3_4b_gsm8k", *RESIDENT], "8xH100"
    )
    with pytest.raises(ConfigError, match=r"the run needs [\d.]+ GiB on a GPU in phase push \(trainer"):
        plan("qwen3_4b_gsm8k", *OFFLOAD, "rollout.sglang.mem_fraction_static=0.93")
