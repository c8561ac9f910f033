"""Fault soak: criteria for a clean end of a part, and the draw of faults; the soak itself is not run."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from slime_like.config.schema.faults import FATAL, RECOVERED, WORKERS
from slime_like.data.dump import rollout_path, save_groups
from tests.data.test_dump import group
from tests.e2e.runs import RunResult
from tests.e2e.same_run import differences, equal_values, sample_differences, weight_differences

soak_faults: Any = importlib.import_module("scripts.soak_faults")
soak_resume: Any = importlib.import_module("scripts.soak_resume")
soak_draw: Any = importlib.import_module("scripts.soak_draw")
page: Any = importlib.import_module("scripts.page")
RANK, MANAGER = (
    "WorkerError: trainer rank 0 died in phase 'step'",
    "WorkerError: rollout manager died in phase 'collect'",
)
DRIVER, RAYLET = "ProcessLost: the driver (process 7) was killed", "ProcessLost: Ray's raylet (process 8) was killed"


@pytest.mark.parametrize(
    ("end", "code", "causes", "clean"),
    [
        ("terminate", 130, [], True),
        ("terminate", -15, [], False),
        ("signals_at_start", 130, [], True),
        ("signals_at_start", -15, [], False),
        ("signals_at_start", 130, [RANK], False),
        ("hangup", 130, [], True),
        ("kill_driver", 1, [DRIVER], True),
        ("kill_driver", -9, [], False),
        ("kill_raylet", 1, [RAYLET], True),
        ("kill_raylet", 1, [RANK, RAYLET], False),
        ("kill_gcs", 1, [RAYLET], False),
        ("kill_rank", 1, [RANK], True),
        ("kill_rank", 1, [], False),
        ("kill_rank", 1, [RANK, RANK], False),
        ("stop_rank", 1, [MANAGER], False),
        ("kill_manager", 1, [MANAGER], True),
        ("kill_manager", 0, [MANAGER], False),
        ("", 0, [], True),
        ("", 0, [RANK], False),
    ],
)
def test_a_part_is_clean_with_its_code_and_its_crash_bundle(
    end: str, code: int, causes: list[str], clean: bool
) -> None:
    part = soak_faults.SoakPart(0, "one engine", end, code, 1.0, False, 0, 1, [], [], "", causes)
    assert part.clean == clean


@pytest.mark.parametrize("seed", range(5))
def test_a_soak_of_a_hundred_faults_has_every_kind(seed: int) -> None:
    ends: Counter[str] = Counter()
    num_by_kind: Counter[str] = Counter()
    first, faults = 0, 0
    while faults < 100:
        plan = soak_draw.draw_part(random.Random(f"{seed} {ends.total()}"), range(first, 480), 5, ends, num_by_kind)
        ends[plan.end] += 1
        num_by_kind.update(fault.kind for fault in plan.faults)
        faults += len(plan.faults) or 1
        first = max((fault.rollout_id for fault in plan.faults), default=first)
        assert first < 480
        if ends.total() == len(soak_draw.FINAL_FAULTS):
            assert ends.keys() == {*FATAL, soak_draw.STARTING} and faults <= 66
    assert num_by_kind.keys() == {*RECOVERED, *WORKERS, *FATAL}
    assert max(num_by_kind[kind] for kind in RECOVERED) - num_by_kind["kill_reward_worker"] <= 1


def test_a_part_without_faults_runs_to_its_end() -> None:
    assert soak_draw.draw_part(random.Random(0), range(470, 480), 0, {}, {}).faults == ()
    assert all(
        fault.rollout_id < 480 for fault in soak_draw.draw_part(random.Random(0), range(479, 480), 5, {}, {}).faults
    )


@pytest.mark.parametrize("name", ["soak_faults", "soak_resume"])
def test_a_page_of_another_origin_is_not_replaced_by_a_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script: Any = importlib.import_module(f"scripts.{name}")
    path = tmp_path / "page.md"
    path.write_text("# Written by hand\n")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--table", str(path)])
    with pytest.raises(SystemExit) as refusal:
        script.main()
    assert refusal.value.code == 2
    assert f"{path} was not written by {name}.py, which would replace it: name another file" in capsys.readouterr().err
    assert path.read_text() == "# Written by hand\n"


def test_a_table_is_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    for text in ("one\n", "two\n"):
        page.TableFile(path, "soak_faults.py").write(text)
        assert path.read_text() == f"<!-- written by scripts/soak_faults.py, which replaces this file -->\n\n{text}"


def write_run(folder: Path, lengths: list[int], loss: float) -> None:
    """Write a run of one rollout of a group, with responses of these lengths, and with weights equal to ``loss``."""
    path = rollout_path(folder / "rollouts", 0)
    path.parent.mkdir(parents=True)
    save_groups(path, [group(0, lengths)])
    (folder / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, 'train/loss': loss})}\n")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    save_file({"norm": np.array([loss], dtype=np.float32)}, folder / "hf" / "model.safetensors")


def test_differences_state_the_result_and_that_of_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ["rollout 0: 2 samples instead of 1", "loss of step 1: 0.5 instead of 0.25", "weight norm"]
    write_run(tmp_path / "whole", [4], 0.25)
    write_run(tmp_path / "run", [4, 5], 0.5)
    faults = soak_faults.FaultSoak(tmp_path, 0, 1)
    kills = soak_resume.ResumeSoak(tmp_path, 0, 1)
    faults.undisturbed_dir = kills.undisturbed_dir = tmp_path / "whole"
    assert [line for line in faults.table().splitlines() if line.startswith("- ")] == [f"- {text}" for text in expected]
    (tmp_path / "run" / "hf" / "config.json").unlink()
    assert [line for line in faults.table().splitlines() if line.startswith("- ")] == [f"- {expected[0]}"]

    def train(*overrides: str, log: Path) -> RunResult:
        write_run(tmp_path / "run_0", [4, 5], 0.5)
        return RunResult(0, "")

    monkeypatch.setattr(soak_resume, "train", train)
    kills._job = ()
    kills.one_run(0)
    assert kills.verdicts[0].differences == expected
    assert "0 of 1 runs ended with the samples and weights of the undisturbed run, bit for bit" in kills.table()


@pytest.mark.parametrize("loss", [0.25, 0.25 + 9e-7, 0.25 + 2e-6])
def test_losses_differ_beyond_the_tolerance_and_weights_in_any_bit(tmp_path: Path, loss: float) -> None:
    write_run(tmp_path / "whole", [4], 0.25)
    write_run(tmp_path / "run", [4], loss)
    problems = [text.partition(" ")[0] for text in differences(tmp_path / "run", 1, reference=tmp_path / "whole")]
    assert problems == {0.25: [], 0.25 + 9e-7: ["weight"], 0.25 + 2e-6: ["loss", "weight"]}[loss]


def test_the_sign_of_a_zero_is_a_difference(tmp_path: Path) -> None:
    source = group(0, [4])
    for name, zero in {"whole": 0.0, "run": -0.0}.items():
        sample = replace(source.samples[0], logprobs=np.full_like(source.samples[0].logprobs, zero))
        path = rollout_path(tmp_path / name / "rollouts", 0)
        path.parent.mkdir(parents=True)
        save_groups(path, [replace(source, samples=(sample,))])
    assert sample_differences(tmp_path / "run", [0], reference=tmp_path / "whole") == ["rollout 0, sample 0: logprobs"]


ZEROS = np.zeros(4, np.float32)


@pytest.mark.parametrize("other", [ZEROS.view(np.int32), ZEROS.reshape(2, 2), [0.0] * 4, None], ids=repr)
def test_an_array_differs_from_one_of_the_same_bytes_and_from_other_values(other: Any, tmp_path: Path) -> None:
    assert equal_values(ZEROS, ZEROS.copy())
    assert not equal_values(ZEROS, other)
    assert not equal_values(other, ZEROS)
    if isinstance(other, np.ndarray):
        for name, array in {"whole": ZEROS, "run": other}.items():
            (tmp_path / name).mkdir()
            save_file({"norm": array}, tmp_path / name / "model.safetensors")
        assert weight_differences(tmp_path / "run", reference=tmp_path / "whole") == ["weight norm"]


def test_a_soak_outside_a_repository_has_an_unknown_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert page.commit() == "unknown"
