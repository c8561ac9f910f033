"""A run with one part of each kind of docs/extending.md, added from outside the package by one file and one line.

The run is that of a copy of the checkout, whose table of names has the lines. Nothing of it is forked from a process that has
imported this checkout's table: each process of the run imports the copy's.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import GDN, LinearSpec, write_model
from tests.e2e import checks
from tests.e2e.runs import REPOSITORY, RunResult, Training, metrics

pytestmark = pytest.mark.e2e
PARTS = Path(__file__).with_name("own_parts")
COPIED = ("train.py", "configs", "slime_like", "slime_like_compat")
NAMES = Path("slime_like", "config", "schema", "names.py")
MODEL = replace(
    GDN,
    num_hidden_layers=2,
    tie_word_embeddings=False,
    initializer_range=0.08,
    linear=LinearSpec(full_attention_interval=2),
)
ROLLOUTS = 2
DRIVER, MANAGER, RANK, REWARD = "driver", "rollout_manager", "trainer_rank0", "reward"


@dataclass(frozen=True, slots=True)
class AddedPart:
    """A part: the line that adds it to ``table``, the overrides that select it, and the process that uses it."""

    table: str
    line: str
    overrides: tuple[str, ...]
    process: str


ADDED = {
    "reward": AddedPart("REWARDS", '"own_reward": "own_rollout:own_reward",', ("reward.name=own_reward",), REWARD),
    "filter": AddedPart(
        "FILTERS", '"own_filter": "own_rollout:own_filter",', ("rollout.filters=[own_filter]",), MANAGER
    ),
    "generate function": AddedPart(
        "GENERATE", '"own_generate": "own_rollout:own_generate",', ("rollout.generate=own_generate",), MANAGER
    ),
    "data source": AddedPart(
        "DATA_SOURCES", '"own_source": "own_rollout:OwnSource",', ("data.source=own_source",), DRIVER
    ),
    "metric sink": AddedPart("SINKS", '"own_sink": "own_rollout:OwnSink",', ("metrics.sinks=[own_sink]",), DRIVER),
    "algorithm": AddedPart(
        "ALGORITHMS", '"own_algo": "own_algo:OwnAlgoConfig",', ("algo=own_algo", "algo.own_weight=0.5"), DRIVER
    ),
    # The algorithm names the next three.
    "loss": AddedPart("LOSSES", '"own_loss": "own_losses:own_loss",', (), RANK),
    "group advantage": AddedPart(
        "GROUP_ADVANTAGES", '"own_group_advantage": "own_rollout:own_group_advantage",', (), DRIVER
    ),
    "token advantage": AddedPart(
        "TOKEN_ADVANTAGES", '"own_token_advantage": "own_losses:OwnTokenAdvantage",', (), RANK
    ),
    "off-policy correction": AddedPart(
        "OFF_POLICY", '"own_correction": "own_losses:own_correction",', ("algo.off_policy=own_correction",), RANK
    ),
    "KL estimator": AddedPart(
        "KL_ESTIMATORS",
        '"own_kl": "own_losses:own_kl",',
        ("algo.kl_loss_type=own_kl", "algo.kl_loss_coef=0.1", "algo.kl_reward_type=own_kl", "algo.kl_coef=0.1"),
        RANK,
    ),
    "weight transport": AddedPart(
        "COLOCATED_TRANSPORTS", '"own_transport": "own_model:OwnSender",', ("weights.transport=own_transport",), RANK
    ),
    "model family": AddedPart(  # an engine's log lists the fused models of all families
        "FAMILIES",
        '"own_family": FamilyEntry("own_model:OwnFamily", fused_engine_model="OwnForCausalLM"),',
        ("model.family=own_family",),
        RANK,
    ),
    "attention": AddedPart(
        "ATTENTIONS", '"own_attention": "own_model:OwnAttention",', ("model.attention=own_attention",), RANK
    ),
    "GDN backend": AddedPart("GDN_BACKENDS", '"own_gdn": "own_model:OwnGDN",', ("model.gdn.backend=own_gdn",), RANK),
}


def test_a_part_of_each_kind_is_used_after_one_line(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    table = checkout / NAMES
    for part in ADDED.values():
        add_line(table, part.table, part.line)
    shutil.copytree(PARTS, checkout, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    write_model(tmp_path / "model", MODEL)
    ArithmeticSpec().write(tmp_path)
    result = train_in(checkout, tmp_path)
    assert result.code == 0, result.output
    run_dir = tmp_path / "run"
    uses = [json.loads(line) for line in (checkout / "used.jsonl").read_text().splitlines()]
    assert {use["names"] for use in uses} == {str(table)}
    assert processes_by_part(uses, run_dir) == {name: {part.process} for name, part in ADDED.items()}
    assert "is not one of OwnForCausalLM, " in (run_dir / "logs" / "engine_0.log").read_text(), "the engine's table"
    assert "Gated DeltaNet ran on own_gdn: " in result.output
    check_metrics(metrics(run_dir), run_dir)
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", run_dir / "hf"))
    assert before.keys() == after.keys() and any(not np.array_equal(before[name], after[name]) for name in before)


def copy_checkout(folder: Path) -> Path:
    """Copy what train.py imports and reads, with the byte code, and return ``folder``."""
    folder.mkdir()
    for name in COPIED:
        if (source := REPOSITORY / name).is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        else:
            shutil.copy2(source, folder)
    return folder


def add_line(file: Path, table: str, line: str) -> None:
    """Insert ``line`` as the first entry of ``table`` into ``file``."""
    head, start, entries = file.read_text().partition(f"\n{table} = {{\n")
    assert start, f"{file} has no {table}"
    file.write_text(f"{head}{start}    {line}\n{entries}")


def train_in(checkout: Path, folder: Path) -> RunResult:
    """Run the checkout's train.py in its folder, with all parts; the run is in ``folder``."""
    return Training(
        "+recipe=quickstart_gdn",
        "run.prepare=null",
        f"model.hf_checkpoint={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        "evaluation.datasets={}",
        "reward.workers=1",
        *("rollout.batch_size=8", "rollout.n_samples_per_prompt=4"),
        *("optim.warmup_steps=0", f"loop.num_rollout={ROLLOUTS}"),
        f"run.dir={folder / 'run'}",
        "run.save_hf=true",
        *(override for part in ADDED.values() for override in part.overrides),
        log=folder / "log",
        script=str(checkout / "train.py"),
        folder=checkout,
    ).wait()


def processes_by_part(uses: list[dict[str, Any]], run_dir: Path) -> Mapping[str, set[str]]:
    """Return the names of the processes that used each part; those of the driver and of the actors are the names of their stacks."""
    names = {int(pid): name for name, pid, _ in (path.stem.rsplit(".", 2) for path in (run_dir / "stacks").iterdir())}
    processes: dict[str, set[str]] = {}
    for use in uses:
        other = REWARD if "slime_like.reward.worker" in use["command"] else use["command"]
        processes.setdefault(use["part"], set()).add(names.get(use["pid"], other))
    return processes


def check_metrics(rows: list[dict[str, Any]], run_dir: Path) -> None:
    """Check the effects of the parts on the metrics, whose values tests/e2e/own_parts determines."""
    checks.check_consistency(rows, cached=False)
    steps = rows[1:]
    assert len(steps) == ROLLOUTS
    for row in steps:
        num_dropped = row["rollout/dropped_groups/own_filter/odd"]
        assert 0 < num_dropped < 8 and row["rollout/num_samples"] == 3 * (8 - num_dropped)
        assert 100 < row["rollout/raw_reward"] < 110
        assert row["data/bad_rows"] == 7
        assert row["train/own_loss"] == pytest.approx(5)
        assert row["train/own_group_advantage"] == 3
        assert row["train/own_weight"] == pytest.approx(0.5)
        assert 0.25 <= row["train/kl_loss"] + 1e-6 < 0.5
    with (run_dir / "own.csv").open(newline="") as file:
        logged = [[float(value) for value in row if value] for row in csv.reader(file)]
    assert logged == [[0], *([row["step"], row["train/own_loss"]] for row in steps)]
