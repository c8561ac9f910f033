"""Soak of damaged files: its options, and the command that its section names; the soak itself is not run."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

soak_files: Any = importlib.import_module("scripts.soak_files")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the sections that the script writes to the page, of soaks without trials."""
    sections: list[str] = []
    monkeypatch.setattr(soak_files, "soak", lambda *_, show: [])
    monkeypatch.setattr(soak_files, "replace_section", lambda _, __, text: sections.append(text))
    return sections


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Return the exit code of scripts/soak_files.py with ``argv``."""
    monkeypatch.setattr("sys.argv", ["soak_files.py", *argv])
    return soak_files.main()


def test_a_kind_that_matches_no_file_names_all_kinds(
    written: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--kind", "xyz")
    message = capsys.readouterr().err
    assert error.value.code == 2 and "--kind 'xyz' matches no kind of files: choose from" in message
    assert all(kind in message for kind in soak_files.FILES) and not written


def test_the_page_takes_only_a_soak_of_all_kinds(
    written: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--write", "--kind", "recipe")
    assert error.value.code == 2 and "--write with --kind 'recipe'" in capsys.readouterr().err and not written
    assert run(monkeypatch, "--write", "--count", "7") == 0
    assert len(written) == 1 and "`scripts/soak_files.py --count 7 --seed 0`" in written[0]


def test_the_printed_command_names_the_kind(
    written: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--kind", "in-flight npz") == 0
    assert "`scripts/soak_files.py --count 1200 --seed 0 --kind 'in-flight npz'`" in capsys.readouterr().out
    assert not written
