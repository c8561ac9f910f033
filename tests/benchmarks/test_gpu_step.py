"""Benchmark of a training step on a GPU, on a phantom GPU: a row with the memory of the step beside that of the traced one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.phantom.device import PhantomGpu
from slime_like.util.deadline import scale

ROOT = Path(__file__).parents[2]
SIZES = ("--tiny", "--traced", "--arms", "dense", "--steps", "1", "--tokens", "512", "--length", "128")


@pytest.mark.ranks
@pytest.mark.slow
def test_the_peak_of_a_step_is_beside_the_traced_peak() -> None:
    result = subprocess.run(
        [sys.executable, "benchmarks/gpu_step.py", *SIZES],
        cwd=ROOT,
        env={**os.environ, **PhantomGpu().environment()},
        capture_output=True,
        text=True,
        timeout=240 * scale(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    head, _, row, *_ = result.stdout.splitlines()
    figures = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert figures["model"] == "dense" and int(figures["parameters"].replace(",", "")) > 1_000_000
    peak, traced = float(figures["peak GiB"]), float(figures["peak GiB, traced"])
    assert 0 < peak <= 1.2 * traced < 3 * peak, result.stdout
    assert float(figures["synchronisations per micro-batch"]) < 5, result.stdout
