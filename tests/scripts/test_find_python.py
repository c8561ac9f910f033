"""``find_python``: what stands on PATH may be a shim that fails, another version, or half an installation."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.scripts.shell import SYSTEM_PATH, bash, executable

REAL = str(Path(sys.executable).resolve())
FAILING_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
OTHER_VERSION = "#!/bin/sh\necho 'is cpython 3.11' >&2\nexit 1\n"


def wrapper(path: Path) -> Path:
    """A python3.12 that is a script, as shims are."""
    return executable(path, f'#!/bin/sh\nexec "{REAL}" "$@"\n')


def find(tmp_path: Path, *folders: Path, **env: str) -> tuple[int, str, str]:
    """``find_python`` with ``folders`` first on PATH and none of this machine's own Pythons."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("awk", "basename", "dirname", "sort", "sh", "true"):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name, path=SYSTEM_PATH)))
    path = ":".join(str(folder) for folder in (*folders, tools))
    # The libraries are sourced with the plain PATH: only the search itself sees the narrow one.
    result = bash(f"PATH='{path}'\nfind_python", {"HOME": str(tmp_path / "home"), **env})
    return result.returncode, result.stdout.strip(), result.stderr


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A pyenv somewhere else than at home, whose shim fails since no 3.12 is chosen there."""
    return executable(tmp_path / "elsewhere" / "shims" / "python3.12", FAILING_SHIM).parent


def test_failing_shim_first_on_path_is_passed_over(tmp_path: Path, shims: Path) -> None:
    good = wrapper(tmp_path / "bin" / "python3.12").parent
    assert find(tmp_path, shims, good) == (0, REAL, "")


def test_version_beside_a_failing_shim_is_found_without_a_home(tmp_path: Path, shims: Path) -> None:
    wrapper(shims.parent / "versions" / "3.12.9" / "bin" / "python3.12")
    newest = executable(shims.parent / "versions" / "3.12.11" / "bin" / "python3.12", FAILING_SHIM)
    assert find(tmp_path, shims) == (0, REAL, "")
    executable(newest, '#!/bin/sh\necho "$0"\n')
    assert find(tmp_path, shims) == (0, str(newest), "")


def test_a_python_that_warns_serves_and_one_that_says_nonsense_does_not(tmp_path: Path) -> None:
    nonsense = executable(tmp_path / "first" / "python3.12", "#!/bin/sh\necho hello\n").parent
    warns = executable(
        tmp_path / "bin" / "python3.12", f'#!/bin/sh\necho "bad locale" >&2\nexec "{REAL}" "$@"\n'
    ).parent
    assert find(tmp_path, nonsense, warns) == (0, REAL, "")


@pytest.mark.parametrize("place", ["PYENV_ROOT", "HOME", "uv", "python3"])
def test_other_places(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    env: dict[str, str] = {}
    if place == "PYENV_ROOT":
        env[place] = str(tmp_path / "root")
        wrapper(tmp_path / "root" / "versions" / "3.12.1" / "bin" / "python3.12")
    elif place == "HOME":
        wrapper(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12")
    elif place == "uv":
        managed = wrapper(tmp_path / "managed" / "python3.12")
        # Without --system it would answer with .venv's, which may be about to go.
        executable(
            folder / "uv", f'#!/bin/sh\n[ "$*" = "python find --no-project --system 3.12" ] && echo "{managed}"\n'
        )
    else:
        wrapper(folder / "python3")
    assert find(tmp_path, folder, **env) == (0, REAL, "")


def test_says_what_was_seen_and_how_to_get_one(tmp_path: Path, shims: Path) -> None:
    old = executable(tmp_path / "bin" / "python3", OTHER_VERSION)
    code, out, err = find(tmp_path, shims, old.parent)
    assert (code, out) == (1, "")
    assert f"{shims}/python3.12 does not run" in err
    assert f"{old} is cpython 3.11" in err
    for way in (
        "apt-get install python3.12 python3.12-venv",
        "uv python install 3.12",
        "pyenv install 3.12",
        "docker/",
    ):
        assert way in err
