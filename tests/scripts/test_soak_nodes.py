"""Soak of killed nodes: its plan, and the check that every sample was trained on once; the soak itself is not run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime_like.checkpoint.files import LATEST
from slime_like.data.dump import rollout_path, save_groups
from tests.data.test_dump import group

soak_nodes: Any = importlib.import_module("scripts.soak_nodes")
soak_page: Any = importlib.import_module("scripts.soak_nodes_page")
GROUPS, ROLLOUTS = 2, 3


@pytest.mark.parametrize("count", [1, 3, 5, 20])
def test_the_kills_alternate_between_transports_phases_and_kinds(count: int) -> None:
    kills = soak_nodes.plan(count, 0)
    assert len(kills) == count and abs(2 * sum(kill.power for kill in kills) - count) <= 1
    if count == 20:
        assert sum(kill.role == "trainer" for kill in kills) == 5
        by_engine = [(kill.transport, kill.phase) for kill in kills if kill.role == "engine"]
        assert {*by_engine} == {(transport, phase) for transport in soak_nodes.LAYOUTS for phase in soak_page.SPANS}


@pytest.mark.parametrize(
    ("limit_s", "option"), [(float("inf"), ""), (0.0, " --limit-s 0.0"), (7200.5, " --limit-s 7200.5")]
)
def test_the_command_on_the_page_has_the_time_limit(
    limit_s: float, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(soaking: Any, run: object, planned_kill: object, _: str) -> object:
        soaking.kills.append(planned_kill)
        return run

    run = SimpleNamespace(run_dir=tmp_path, wait=MagicMock(return_value=(130, "")))
    monkeypatch.setattr(soak_nodes, "ray_nodes", MagicMock())
    monkeypatch.setattr(soak_nodes, "make_job", MagicMock())
    monkeypatch.setattr(soak_nodes, "send_request", MagicMock())
    monkeypatch.setattr(soak_nodes.NodeSoak, "start", MagicMock(return_value=run))
    monkeypatch.setattr(soak_nodes.NodeSoak, "add_engines", MagicMock())
    monkeypatch.setattr(soak_nodes.NodeSoak, "kill", kill)
    page = MagicMock(return_value="page")
    monkeypatch.setattr(soak_nodes, "page", page)
    assert [*soak_nodes.soak(1, 2, tmp_path, None, limit_s)][-1] == "page"
    assert page.call_args.args[2] == f"python scripts/soak_nodes.py --kills 1 --seed 2{option}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the folder of an ended run of three rollouts."""
    rows = [{"step": step, "probe/logprob_abs_diff_max": 1e-7 * step} for step in range(ROLLOUTS + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for i in range(ROLLOUTS):
        write_rollout(tmp_path, i, range(GROUPS * i, GROUPS * (i + 1)), i)
    folder = tmp_path / "checkpoints" / "rollout"
    folder.mkdir(parents=True)
    (folder.parent / LATEST).write_text(str(ROLLOUTS))
    write_cursor(tmp_path, GROUPS * ROLLOUTS)
    return tmp_path


def write_rollout(run_dir: Path, index: int, group_ids: Any, version: int) -> None:
    path = rollout_path(run_dir / "rollouts", index)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    save_groups(path, [group(group_id, [4, 5], version=version) for group_id in group_ids])


def write_cursor(run_dir: Path, offset: int) -> None:
    cursor = {"epoch": 0, "rows": 100, "offset": offset}
    path = run_dir / "checkpoints" / "rollout" / f"state_{ROLLOUTS}.json"
    path.write_text(json.dumps({"cursor": cursor}))


def test_samples_are_counted(run_dir: Path) -> None:
    count = soak_page.check_samples(run_dir, is_ended=True)
    assert (count.num_rollouts, count.num_samples) == (ROLLOUTS, ROLLOUTS * GROUPS * 2)
    assert count.max_probe_difference == pytest.approx(3e-7)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run_dir: write_rollout(run_dir, 1, [3, 4], 1), r"rollout 1 has groups \[3, 4\]"),
        (lambda run_dir: write_rollout(run_dir, 2, [2, 3], 2), r"rollout 2 has groups \[2, 3\]"),
        (lambda run_dir: write_rollout(run_dir, 2, [4, 5], 1), r"rollout 2 was sampled with weights \{1\}"),
        (lambda run_dir: write_cursor(run_dir, 5), "the data cursor is at"),
        (lambda run_dir: (run_dir / "checkpoints" / LATEST).write_text("2"), "not that of the last rollout"),
        (lambda run_dir: (run_dir / "metrics.jsonl").open("a").write('{"step": 3}\n'), "logged twice"),
    ],
)
def test_a_lost_or_doubled_sample_fails_the_soak(run_dir: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(run_dir)
    with pytest.raises(AssertionError, match=message):
        soak_page.check_samples(run_dir, is_ended=True)
