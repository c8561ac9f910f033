"""Pages of the benchmarks: the command and commit in their headers, and figures read from logs."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

arms: Any = importlib.import_module("benchmarks.arms")
run: Any = importlib.import_module("benchmarks.run")
spin: Any = importlib.import_module("benchmarks.spin")
startup: Any = importlib.import_module("benchmarks.startup")

COMMAND = "python benchmarks/run.py startup --rounds 2 --write"
DECODE = (
    "[2026-11-21 22:00:00] Decode batch, #running-req: {}, #token: 4096, token usage: 0.06, cpu graph: False, "
    "gen throughput (token/s): {}, #queue-req: 0\n"
)


def startup_row(bare: float, first: float, *, warm: bool = False) -> Any:
    return startup.Round(bare, {"ready": first - 1}, first, warm)


@pytest.mark.parametrize(
    ("rounds", "warm_start"),
    [
        (
            [startup_row(9, 99), startup_row(10, 15), startup_row(10, 17)],
            "present before the first run, and every round used it",
        ),
        (
            [startup_row(9, 99, warm=True), startup_row(10, 15), startup_row(10, 17)],
            "created by the run before round 1",
        ),
        ([startup_row(9, 99), startup_row(10, 15), startup_row(10, 17, warm=True)], "was created in round 2"),
    ],
)
def test_a_page_of_starts_names_the_origin_of_the_warm_start(rounds: list[Any], warm_start: str) -> None:
    text = startup.report(rounds, "Machine: this one.", COMMAND)
    assert f"Command: `{COMMAND}`. The quickstart's initial model" in text and warm_start in text
    assert "**1.60 times**" in text and "median of 2 rounds" in text and "99" not in text


def test_pages_name_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    assert run.commit() == "Commit unknown (no git checkout)."
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert run.commit() == f"Commit {head.strip()}."
    assert run.machine(0.5).endswith(run.commit())
    (tmp_path / "docs" / "page").write_text("2")  # as if an earlier measurement had written it
    assert run.commit() == f"Commit {head.strip()}."
    (tmp_path / "file").write_text("2")
    assert run.commit() == f"Commit {head.strip()}, with changes that are not committed."


def test_the_hand_written_part_of_a_page_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text in ("first", "second\n"):
        run.write(page, text)
        assert page.read_text() == f"{text.strip()}\n"
    page.write_text(f"old\n\n{run.MARK}\n\n## Findings\n\nOne.\n")
    for text in ("third\n\n", "fourth"):
        run.write(page, text)
        assert page.read_text() == f"{text.strip()}\n\n{run.MARK}\n\n## Findings\n\nOne.\n"


def test_the_measured_end_of_a_page_is_replaced_and_a_missing_page_is_created(tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.md"
    for text in ("first\n", "second\n"):
        run.write_below(page, "# Title", text)
        assert page.read_text() == f"# Title\n\n{run.BELOW}\n\n{text}"
    page.write_text(f"# Title\n\nFindings.\n\n{run.BELOW}\n\nold\n")
    run.write_below(page, "# Title", "third\n")
    assert page.read_text() == f"# Title\n\nFindings.\n\n{run.BELOW}\n\nthird\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trl", "--steps", "3"], "argument --steps: '3' is not a number of at least 4"),
        (["spin", "--rounds", "0"], "argument --rounds: '0' is not a number of at least 1"),
        (["spin", "--turns", "2000,-1"], "argument --turns: '-1' is not a number of at least 0"),
        (["spin", "--sizes", "tiny,huge"], "argument --sizes: 'huge' is not one of tiny, 20m"),
    ],
)
def test_bad_options_are_refused_before_a_run(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(argv)
    assert message in capsys.readouterr().err


def test_an_arm_that_does_not_end_is_stopped() -> None:
    with pytest.raises(SystemExit, match=r"cat /dev/zero \.\.\. did not end within 0.1 s; see "):
        arms.run_tree(["cat", "/dev/zero"], {"PATH": os.environ["PATH"]}, Path("/dev/null"), limit_s=0.1)


def test_decode_steps_are_read_from_the_engines_log() -> None:
    log = "".join(DECODE.format(running, rate) for running, rate in ((64, "12800.00"), (7, "100.00"), (64, "6400.00")))
    assert spin.decode_seconds(log) == [0.005, 0.01]
    with pytest.raises(SystemExit, match="names no decode batch of all samples"):
        spin.decode_seconds(DECODE.format(7, "100.00"))
