"""Recipes that cannot be written: one message, which names the file and the fix."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.errors import ConfigError, SlimeLikeError
from slime_like_compat.slime.check import check_folder
from slime_like_compat.slime.job import convert_script
from slime_like_compat.verl.check import check_verl
from tests.config.bad_input import refusal
from tests.convert import slime_lines, verl_lines

CALLS: dict[str, Callable[[Path], object]] = {
    "a script": lambda folder: convert_script(folder / "slime.sh", folder / "recipe" / "a.yaml"),
    "a folder of slime": lambda folder: check_folder(folder),
    "a folder of verl": lambda folder: check_verl(folder, variables={}, user_overrides=[verl_lines.REWARD]),
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "slime.sh").write_text(f"python3 train.py {slime_lines.NEEDED}")
    (tmp_path / "verl.sh").write_text(f"python3 -m verl.trainer.main_ppo {verl_lines.NEEDED}")
    return tmp_path


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_missing_temporary_folder_is_one_message(
    call: Callable[[Path], object], scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(scripts / "nowhere"))
    with refusal(["the temporary folder cannot be written (No such file", "set TMPDIR"], SlimeLikeError):
        call(scripts)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_full_temporary_folder_is_one_message(
    call: Callable[[Path], object], scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = scripts / "temporary"
    temporary.mkdir()
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        if path.is_relative_to(temporary):
            raise OSError(28, "No space left on device")
        return write_text(path, text)

    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(Path, "write_text", write)
    words = [str(temporary), "a.yaml cannot be written (No space left on device)", "free space there", "set TMPDIR"]
    with refusal(words, SlimeLikeError):
        call(scripts)


def test_a_recipe_with_too_long_a_name_is_one_message(scripts: Path) -> None:
    path = scripts / "recipe" / f"{'a' * 300}.yaml"
    with refusal([f"--out {path} cannot be written (File name too long): name another file"], ConfigError):
        convert_script(scripts / "slime.sh", path)
