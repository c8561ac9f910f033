"""Table of the benchmark of a training step on a GPU: each arm's peak beside the traced one, whose command is a valid run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError

gpu_step: Any = importlib.import_module("benchmarks.gpu_step")
FIGURES = gpu_step.StepFigures(1_720_574_976, 32_768, 2.0, 16.0, 36.3, {"step.py:1": 6})


def test_the_peak_of_a_step_is_beside_the_traced_peak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_trace(argv: Sequence[str], machine: str) -> list[dict[str, Any]]:
        cfg = load_config(list(argv), machine=False, files=False)
        assert (cfg.parallel.max_tokens_per_rank, cfg.rollout.max_context_len, machine) == (8192, 2048, "1xH200")
        if cfg.model.gdn.backend == "fla":
            raise ConfigError("the trace failed: no fla here")
        phases = {"build": 40, "step": 38, "transfer": 3}
        return [{"phases": [{"name": name, "allocated": gib * gpu_step.GIB} for name, gib in phases.items()]}]

    monkeypatch.setattr(gpu_step, "run_trace", run_trace)
    monkeypatch.setattr(gpu_step, "_in_process", lambda name, argv: None if name == "moe" else FIGURES)
    assert gpu_step.main(["--traced", "--arms", "dense", "moe", "hybrid-fla"]) == 1
    out, err = capsys.readouterr()
    head, _, *rows = out.splitlines()
    names = head.strip("| ").split(" | ")
    assert names[5:7] == ["peak GiB", "peak GiB, traced"]
    assert rows[0] == "| dense | 1,720,574,976 | 16,384 | 2.000 | 16.0 | 36.30 | 38.00 | 1.5 |"
    assert rows[1].startswith("| moe | failed |") and all(row.count("|") == len(names) + 1 for row in rows[:3])
    assert "| 36.30 | failed |" in rows[2] and "no fla here" in err


def test_the_peak_is_that_of_the_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The creation of the model and the steps that are left out need more memory than a timed step."""
    peaks, step_peaks = [90], iter([50, 40, 20, 30])
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: peaks.__setitem__(slice(None), [10]))
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: max(peaks) * gpu_step.GIB)

    def step() -> float:
        peaks.append(next(step_peaks))
        return 1.0

    seconds, peak = gpu_step.timed_steps("dense", step, 2, "cuda")
    assert (len(seconds), peak, next(step_peaks, None)) == (2, 30.0, None)
