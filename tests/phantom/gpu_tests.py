"""Plugin of pytest for tests marked ``gpu`` on phantom GPUs. It skips the tests of a table, and writes the outcome of every test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ENGINE = "SGLang's engine needs sglang-kernel, which only the GPU lock file has"
FLASHINFER = "needs FlashInfer, which only the GPU lock file has, and compares its values"
FLA = "fla's and FlashQLA's kernels are not in the CPU lock file"


@dataclass(frozen=True, slots=True)
class NotOnPhantom:
    """Tests of a file, with ``part`` in their names, that cannot run on a phantom GPU."""

    file: str
    part: str
    reason: str

    def matches(self, test: str) -> bool:
        """Return True if the row covers the test with this node id."""
        file, _, name = test.partition("::")
        return file == self.file and self.part in name


NOT_ON_PHANTOM = (
    NotOnPhantom("tests/engine/test_dcp_flashinfer_gpu.py", "", FLASHINFER),
    NotOnPhantom("tests/engine/test_dcp_gpu.py", "an_engine_of_two_ranks", ENGINE),
    NotOnPhantom("tests/engine/test_flow_mla_gpu_engines.py", "", ENGINE),
    NotOnPhantom("tests/gdn/test_gpu.py", "fla", FLA),
    NotOnPhantom("tests/train/test_gpu.py", "flashqla", FLA),
    NotOnPhantom("tests/train/test_gpu.py", "transformer_engine", "TransformerEngine is in no lock file"),
)


@dataclass(frozen=True, slots=True)
class GpuTestOutcome:
    """Outcome of a test: passed, failed or skipped, with the error or the reason."""

    result: str
    text: str = ""


def row_of(test: str) -> NotOnPhantom | None:
    """Return the row of the table that covers a test, or None."""
    return next((row for row in NOT_ON_PHANTOM if row.matches(test)), None)


def problems(outcomes: Mapping[str, GpuTestOutcome]) -> list[str]:
    """Return one message per test that neither passed nor is in the table, and per row without a test."""
    messages = [
        f"{test} {outcome.result} on a phantom GPU: {outcome.text}\nput assertions about values under tests.values.has_values(), or add "
        f"a row to {Path(__file__).name}"
        for test, outcome in outcomes.items()
        if outcome.result != "passed" and row_of(test) is None
    ]
    stale = [row for row in NOT_ON_PHANTOM if not any(map(row.matches, outcomes))]
    return [*messages, *(f"{Path(__file__).name} has a row without a test: {row}" for row in stale)]


def read_outcomes(file: Path) -> dict[str, GpuTestOutcome]:
    """Return the outcomes that the plugin has written."""
    return {test: GpuTestOutcome(*outcome) for test, outcome in json.loads(file.read_text()).items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file of outcomes."""
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skip the tests of the table."""
    for item in items:
        if (row := row_of(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=row.reason))


class OutcomeWriter:
    """Collector of the outcomes of all tests."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test's call, or the phase before or after it that failed or skipped."""
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome, report.longreprtext

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._file.write_text(json.dumps(self._outcomes))


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer."""
    file = config.getoption("--outcomes")
    assert file is not None, "the option is required"
    config.pluginmanager.register(OutcomeWriter(file))
