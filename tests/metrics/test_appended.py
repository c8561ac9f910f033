"""metrics.jsonl survives removal and a temporarily full disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from slime_like.metrics import appended
from slime_like.metrics.appended import AppendOnlyFile

SIZE = 64 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """Mount a disk of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount_result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mount_result.returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_lines_refused_by_a_full_disk_are_written_later(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ballast = disk / "metrics.jsonl", disk / "ballast"
    file = AppendOnlyFile(path)
    file.write("first\n")
    with pytest.raises(OSError, match="No space"):
        ballast.write_bytes(bytes(2 * SIZE))
    lines = [f"{number}{'.' * 3000}\n" for number in range(4)]
    for line in lines:
        file.write(line)
    stderr = capsys.readouterr().err
    assert (
        stderr
        == f"warning: {path}: No space left on device; its new lines stay in memory until they can be written, and training continues\n"
    )
    ballast.unlink()
    file.write("last\n")
    file.close()
    assert path.read_text() == "".join(["first\n", *lines, "last\n"])
    assert capsys.readouterr().err == ""


def test_lines_that_are_lost_are_counted(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = AppendOnlyFile(disk / "metrics.jsonl")
    for _ in range(3):
        file.write("." * SIZE + "\n")
    file.close()
    assert "its end is missing: 3 lines could not be written" in capsys.readouterr().err


def test_lines_that_were_written_are_not_counted_as_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for one and a half of three lines."""
    write, room = os.write, [0, 0, 6]

    def write_some(fd: int, content: bytes) -> int:
        if not (size := room.pop(0) if room else 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, content[:size])

    file = AppendOnlyFile(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(appended.os, "write", write_some)
    for line in ("1..\n", "2..\n", "3..\n"):
        file.write(line)
    file.close()
    err = capsys.readouterr().err
    assert err.count("No space left on device") == 1
    assert "its end is missing: 2 lines could not be written" in err


def test_a_removed_file_that_cannot_be_opened_is_restored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = AppendOnlyFile(path)
    file.write("1\n")
    path.unlink()
    with monkeypatch.context() as patch:

        def fail(path: Path) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(AppendOnlyFile, "_open", staticmethod(fail))
        file.write("2\n")
    with (tmp_path / "other").open("wb"):  # takes the number of a descriptor that was closed
        file.write("3\n")
    file.close()
    assert path.read_text() == "1\n2\n3\n"
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize("removal", ["removed", "folder removed", "replaced"])
def test_a_removed_file_is_rewritten_with_all_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], removal: str
) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = AppendOnlyFile(path)
    file.write("1\n")
    path.unlink()
    if removal == "folder removed":
        path.parent.rmdir()
    elif removal == "replaced":
        path.write_text("another's\n")
    file.write("2\n")
    file.write("3\n")
    file.close()
    assert path.read_text() == "1\n2\n3\n"
    assert capsys.readouterr().err.count("it was written again, with all its lines") == 1
