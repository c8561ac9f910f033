"""Every test marked ``gpu`` on phantom GPUs, with its assertions about values left out; a table has the tests that cannot run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.phantom.device import PhantomGpu
from slime_like.util.deadline import scale
from tests.phantom.gpu_tests import NOT_ON_PHANTOM, GpuTestOutcome, problems, read_outcomes

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 400
COPIED = 16 << 20  # bytes of the largest copy that is carried out: more than any tensor whose bits a test compares


def gpu_files() -> list[str]:
    """Return the test files with a test marked ``gpu``."""
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file.name != Path(__file__).name]
    return [str(file.relative_to(ROOT)) for file in files if re.search(r"\bmark\.gpu\b", file.read_text())]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GpuTestOutcome]:
    file = tmp_path_factory.mktemp("gpu") / "outcomes.json"
    variables = {"PHANTOM_GPU_COPY_LIMIT": str(COPIED), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, **PhantomGpu(num_devices=2).environment(), **variables}
    options = ("-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider", "-p", "tests.phantom.gpu_tests")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--outcomes={file}", *gpu_files()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS * scale(),
        check=False,
    )
    assert file.exists() and run.returncode in (0, 1), run.stdout + run.stderr  # 2: a file could not be imported
    return read_outcomes(file)


def test_every_gpu_test_runs_or_is_in_the_table(outcomes: dict[str, GpuTestOutcome]) -> None:
    assert not (messages := problems(outcomes)), "\n\n".join(messages)
    assert sum(outcome.result == "passed" for outcome in outcomes.values()) > 30


def test_a_test_that_fails_or_skips_without_a_row_is_named() -> None:
    expected_outcomes = {
        f"{row.file}::test_{row.part}[x]": GpuTestOutcome("skipped", row.reason) for row in NOT_ON_PHANTOM
    }
    assert problems(expected_outcomes | {"tests/a/test_gpu.py::test_new": GpuTestOutcome("passed")}) == []
    for result in ("failed", "skipped"):
        (message,) = problems(
            expected_outcomes | {"tests/a/test_gpu.py::test_new": GpuTestOutcome(result, "some text")}
        )
        assert message.startswith(f"tests/a/test_gpu.py::test_new {result} on a phantom GPU: some text")
    first = next(iter(expected_outcomes))
    (message,) = problems({test: outcome for test, outcome in expected_outcomes.items() if test != first})
    assert "row without a test" in message and NOT_ON_PHANTOM[0].file in message
