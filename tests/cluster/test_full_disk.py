"""Full disks and broken streams: ``run.on_failed_save`` applies to all files, and a broken stream ends no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.cluster.run.full_disk import tolerate_full_disk
from slime_like.config.schema.run import RunConfig
from slime_like.errors import DeadlineExceeded, SlimeLikeError
from slime_like.util.deadline import scale
from tests.e2e.runs import REPOSITORY

FULL = Path("/dev/full")


def fill(path: Path) -> None:
    """Write part of ``path``, then fail like a full disk."""
    path.write_text("torn")
    FULL.write_text("more")


def test_a_full_disk_is_named_and_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rollouts" / "0.npz"
    path.parent.mkdir()
    with (
        pytest.raises(
            SlimeLikeError, match=rf"^{path}: No space left on device; is the disk full\? \(run.on_failed_save=continue"
        ),
        tolerate_full_disk(path, RunConfig()),
    ):
        fill(path)
    assert not path.exists()


def test_on_failed_save_continue_warns_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "0.npz"
    with tolerate_full_disk(path, RunConfig(on_failed_save="continue")):
        fill(path)
    assert capsys.readouterr().err.startswith(
        f"warning: training continues without a file (run.on_failed_save=continue): {path}: No space left on device"
    )
    assert not path.exists()


@pytest.mark.parametrize("reaction", ["stop", "continue"])
def test_a_missed_deadline_is_not_a_full_disk(tmp_path: Path, reaction: str) -> None:
    """The ranks may still be inside the export, so the run must not continue."""
    error = DeadlineExceeded("driver waited 600 s for rank 1 in phase 'export_hf'")
    with (
        pytest.raises(DeadlineExceeded, match=f"^{error}$"),
        tolerate_full_disk(tmp_path / "hf", RunConfig(on_failed_save=reaction)),
    ):
        raise error


PRINTS = """
import sys
from slime_like.cluster.supervise.streams import tolerate_write_errors
tolerate_write_errors()
sys.stdin.readline()
for number in range(3):
    print(number, flush=True)
    print(number, file=sys.stderr, flush=True)
sys.exit(7)
"""


def start(**streams: int) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([sys.executable, "-c", PRINTS], cwd=REPOSITORY, text=True, **pipes)  # pyright: ignore


def test_a_closed_stdout_does_not_end_the_run() -> None:
    process = start()
    assert process.stdout is not None
    process.stdout.close()  # as head does
    process.stdout = None
    _, stderr = process.communicate("go\n", timeout=60 * scale())
    assert process.returncode == 7
    warning, *numbers = stderr.splitlines()
    assert warning == "warning: standard output: Broken pipe; the run continues, see its run.dir"
    assert numbers == ["0", "1", "2"]


def test_a_full_disk_behind_stdout_does_not_end_the_run() -> None:
    with FULL.open("w") as full:
        process = start(stdout=full.fileno())
        _, stderr = process.communicate("go\n", timeout=60 * scale())
    assert process.returncode == 7
    assert stderr.count("No space left on device") == 1


def test_a_closed_stderr_does_not_end_the_run() -> None:
    process = start()
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    stdout, _ = process.communicate("go\n", timeout=60 * scale())
    assert (process.returncode, stdout) == (7, "0\n1\n2\n")


CLOSED = """
import os, subprocess, sys
os.close(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[2]])
"""
OPENS = """
import os, subprocess, sys
from slime_like.cluster.supervise.streams import tolerate_write_errors
tolerate_write_errors()
file = os.open(sys.executable, os.O_RDONLY)
print("printed", flush=True)
subprocess.run(["sh", "-c", "echo child; echo error >&2"], check=True)
print("also printed", file=sys.stderr)
sys.exit(0 if file > 2 else 9)
"""


@pytest.mark.parametrize(("number", "num_lines"), [(0, 4), (1, 2), (2, 2)])
def test_a_stream_closed_by_the_caller_does_not_end_the_run(number: int, num_lines: int) -> None:
    argv = [sys.executable, "-c", CLOSED, str(number), OPENS]
    result = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60 * scale(), check=False)
    assert result.returncode == 0, result.stderr
    assert len((result.stdout + result.stderr).splitlines()) == num_lines
