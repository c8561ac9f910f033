"""Page of the benchmark of decode context parallelism, for measurements made up by the tests."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from slime_like.rollout.engine.connection import KvUsage

dcp: Any = importlib.import_module("benchmarks.dcp")


def measured(token_ms: float, seconds: float, *, capacity: int = 384, retractions: int = 0, last: int = 3) -> Any:
    """Return a round with two responses of two tokens each."""
    usage = KvUsage(capacity, capacity, capacity // 100, retractions, 9, seconds / 4 if capacity > 384 else None)
    return dcp.DcpRound(token_ms / 1e3, seconds, usage, ((1, 2), (1, last)))


RESULTS = {
    "TP2": [measured(10, 4, retractions=3), measured(20, 8, retractions=5), measured(10, 4, retractions=4)],
    "DCP2": [measured(12, 2, capacity=768), measured(22, 5, capacity=768), measured(11, 1, capacity=768, last=4)],
}


def test_rows_have_medians_and_ratios_of_the_same_round() -> None:
    _, _, plain, sharded = dcp.table(RESULTS)
    assert plain == "| TP2 | 384 | 10.0 (1.00) | 1 (1.00) | 3 | 0% | 4 | 6 of 6 |"
    assert sharded == "| DCP2 | 768 | 12.0 (1.10) | 2 (2.00) | 7 | 25% | 0 | 5 of 6 |"


def test_the_page_names_command_load_and_every_round() -> None:
    sections = {name: dcp.section(RESULTS, case) for name, case in dcp.CASES.items()}
    text = dcp.page(sections, "Machine: this one.", "python benchmarks/dcp.py --rounds 3")
    assert "Machine: this one." in text and "Command: `python benchmarks/dcp.py --rounds 3`" in text
    assert (
        "medians over rounds, but the number of requests at once is a maximum, and that of equal responses a sum"
        in text
    )
    assert text.count("3 rounds.") == 2 and text.count("by round: DCP2: 2.00, 1.60, 4.00.") == 2
    assert "## A wide model" in text and "## A narrow model" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_the_page_is_written_with_all_cases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dcp.main(["--write", "--case", "wide"])
    assert "remove --case" in capsys.readouterr().err


@pytest.mark.parametrize("case", dcp.CASES.values(), ids=list(dcp.CASES))
def test_engines_differ_only_in_dcp(case: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The KV cache holds one request, but not all requests, with and without DCP."""
    specs: list[Any] = []

    class Server:
        def __init__(self, spec: Any, admin_key: str) -> None:
            specs.append(spec)

        def start(self) -> None: ...

    monkeypatch.setattr(dcp, "EngineServer", Server)
    for name in dcp.ARMS:
        dcp.start(name, tmp_path / "model", case)
    arms = [(spec.dcp, spec.dcp_comm, spec.dcp_replicate_q) for spec in specs]
    assert arms == [(1, "ag_rs", False), (2, "ag_rs", False), (2, "a2a", False), (2, "a2a", True)]
    assert len({spec.log_path for spec in specs}) == 4
    assert {(spec.tp, spec.cpu_kernels, spec.sglang["max_total_tokens"]) for spec in specs} == {(2, "c", case.rows)}
    tokens = case.prompt + case.response
    assert tokens < case.rows < 2 * case.rows < case.num_requests * tokens
