"""Profile of collectives: memory per op as a table, and as a guard config that the loader reads."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.plan.guard import guard_spec, profile_folder
from slime_like.config.load.loader import load_config
from slime_like.config.schema.collectives import OPS, SLIME_SKIPS, canonical
from slime_like.distributed.guard import advice
from slime_like.distributed.guard.advice import MIB, MeasuredOp
from slime_like.distributed.wrapper.profile import MemoryDelta
from slime_like.errors import ConfigError, DataError
from slime_like.util.deadline import scale

ROOT = Path(__file__).resolve().parents[2]
CLEAN = MeasuredOp(
    op="broadcast",
    group="dp",
    source="driver",
    calls=10,
    num_bytes=1000,
    time_ns=10**9,
    query_ns=10_000,
    first_allocator=0,
    first_driver=0,
    later_allocator=0,
    later_driver=0,
)
FIRST = dataclasses.replace(CLEAN, op="all_reduce", first_driver=300 * MIB)
GROWS = dataclasses.replace(CLEAN, op="all_gather", later_allocator=64 * MIB)
SLOW = dataclasses.replace(GROWS, op="reduce_scatter", query_ns=8_000_000)
RANKS = {"trainer_rank0": [CLEAN, GROWS, SLOW], "trainer_rank1": [CLEAN, FIRST, GROWS]}


def guard_of(folder: Path, text: str) -> dict[str, str]:
    """Load ``text`` as a guard config; return its threshold and the checks per op."""
    (folder / "guard").mkdir(parents=True, exist_ok=True)
    (folder / "guard" / "measured.yaml").write_text(text)
    cfg = load_config(["+recipe=quickstart", "--config-dir", str(folder), "guard=measured"], files=False)
    spec = guard_spec(cfg, "trainer")
    return {"threshold": cfg.guard.threshold} | {op: spec.policy(op, "dp").checks for op in cfg.guard.ops}


@pytest.mark.parametrize("text", ["[", '[{"op": "broadcast"}]', '{"op": 1}'])
def test_a_profile_of_another_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer_rank0.json").write_text(text)
    with pytest.raises(DataError, match=r"trainer_rank0\.json .*; remove .* and profile again"):
        advice.read_rows(tmp_path)


def test_checks_follow_the_measured_memory(tmp_path: Path) -> None:
    text = advice.to_yaml(RANKS, "four ops")
    expected = {"broadcast": "never", "all_reduce": "auto", "all_gather": "below", "reduce_scatter": "auto"}
    other_ops = {op.name: "auto" for op in OPS if op.name not in expected}
    assert guard_of(tmp_path, text) == {"threshold": "600MiB", **expected, **other_ops}
    assert len(other_ops) > 20
    assert "twice the 300.0 MiB that all_reduce took in group dp at its first use" in text
    lines = {line.split(":")[0].strip(): line.partition("# ")[2] for line in text.splitlines() if line[:2] == "  "}
    assert lines["broadcast"].startswith("takes no memory")
    assert lines["all_reduce"].startswith("the first use of a size takes 300.0 MiB, no later one of 10 calls")
    assert lines["broadcast_object_list"].startswith("not measured")
    assert lines["all_gather"].endswith("0.01% of the op's own time")
    assert lines["reduce_scatter"].endswith("8.0% of the op's own time")


def test_host_memory_taken_by_other_processes_is_ignored() -> None:
    host = dataclasses.replace(FIRST, source="host", first_allocator=MIB)
    (advised_op,) = advice.advise({"rank0": [host]})
    assert (advised_op.checks, advice.threshold({"rank0": [host]})[0]) == ("never", 256)


def test_first_and_later_uses_are_measured_separately() -> None:
    """A call with more bytes than any before counts as the first use of its size."""
    delta = MemoryDelta()
    for allocator, driver, size in ((5, 300, 64), (7, 0, 64), (-3, 2, 8), (900, 20, 65), (6, 1, 65), (-4, -4, 999)):
        delta.add(allocator, driver, 100, size)
    assert (delta.first_allocator, delta.first_driver, delta.later_allocator, delta.later_driver) == (900, 300, 7, 2)
    assert (delta.calls, delta.query_ns) == (6, 600)
    row = dataclasses.replace(FIRST, first_allocator=2 * MIB)
    *_, line = advice.table({"rank0": [row], "rank1": [dataclasses.replace(row, later_driver=MIB, calls=30)]})
    assert line == "| all_reduce | dp | 2 | 40 | 50 | 2.00 | 300.00 | 0.00 | 1.00 | 10.0 |"


def test_a_rank_with_two_groups_of_the_same_label_counts_once() -> None:
    *_, line = advice.table({"rank0": [CLEAN, CLEAN], "rank1": [CLEAN], "rank2": [FIRST]})
    assert line.startswith("| broadcast | dp | 2 | 30 |")


def test_a_recipe_that_sets_epochs_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script: Any = importlib.import_module("scripts.profile_comm")
    recipe = tmp_path / "recipe" / "epochs.yaml"
    recipe.parent.mkdir()
    recipe.write_text("# @package _global_\ndefaults:\n  - quickstart\n  - _self_\nloop:\n  num_epoch: 3\n")
    commands: list[list[str]] = []
    monkeypatch.setattr(script, "train_main", lambda argv: commands.append(argv) or 0)
    overrides = [f"--config-dir={tmp_path}", "+recipe=epochs", f"run.dir={tmp_path / 'run'}"]
    assert script.run(overrides, 2) == (0, profile_folder(str(tmp_path / "run")))
    (command,) = commands
    assert load_config(command, files=False).loop.num_rollout == 2


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_policy_that_cannot_be_written_is_refused_before_the_sweep(
    is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: Any = importlib.import_module("scripts.profile_comm")
    sweeps: list[int] = []
    monkeypatch.setattr(script, "sweep", lambda ranks, folder: sweeps.append(ranks))
    if is_folder:
        (tmp_path / "guard" / "measured.yaml").mkdir(parents=True)
    else:
        (tmp_path / "guard").write_text("a file\n")
    with pytest.raises(
        ConfigError, match=r"guard/measured\.yaml cannot be written \(.*\): choose another --out or --name"
    ):
        script.main(["--sweep", "2", "--out", str(tmp_path)])
    assert not sweeps


@pytest.mark.ranks
def test_a_sweep_over_two_ranks(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "scripts/profile_comm.py", "--sweep", "2", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240 * scale(),
    )
    assert result.returncode == 0, result.stderr
    ops = {"all_reduce", "broadcast", "batch_isend_irecv", *(canonical("", name).name for name in SLIME_SKIPS)}
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if "| world | 2 |" in line]
    assert {row[0] for row in rows} == ops
    guard = guard_of(tmp_path / "again", (tmp_path / "out" / "guard" / "measured.yaml").read_text())
    assert guard.keys() == {"threshold"} | {op.name for op in OPS}
    assert {checks for op, checks in guard.items() if op not in {*ops, "threshold"}} == {"auto"}
    assert guard["barrier"] == "never"
    # On a CPU, memory is taken when it is written: each call writes 4 MiB of results to new memory.
    assert guard["all_to_all_single"] != "never"
