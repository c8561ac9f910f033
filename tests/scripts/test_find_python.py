"""``find_python``: entries of PATH may be failing shims, other versions or broken installations."""

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
    """Write a python3.12 that is a script, as shims are."""
    return executable(path, f'#!/bin/sh\nexec "{REAL}" "$@"\n')


def find(tmp_path: Path, *folders: Path, **env: str) -> tuple[int, str, str]:
    """Run ``find_python`` with ``folders`` first on PATH and none of this machine's Pythons."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("awk", "basename", "dirname", "sort", "sh", "true"):
        if not (tools / name).exists():
            (tools / name).symlink_to(str(shutil.which(name, path=SYSTEM_PATH)))
    path = ":".join(str(folder) for folder in (*folders, tools))
    # The libraries are sourced with the plain PATH; only the search uses the narrow one.
    result = bash(f"PATH='{path}'\nfind_python", {"HOME": str(tmp_path / "home"), **env})
    return result.returncode, result.stdout.strip(), result.stderr


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """Write a pyenv outside of the home folder whose shim fails because no 3.12 is selected."""
    return executable(tmp_path / "elsewhere" / "shims" / "python3.12", FAILING_SHIM).parent


def test_a_failing_shim_on_path_is_skipped(tmp_path: Path, shims: Path) -> None:
    good = wrapper(tmp_path / "bin" / "python3.12").parent
    assert find(tmp_path, shims, good) == (0, REAL, "")


def test_a_version_of_a_failing_shims_pyenv_is_found(tmp_path: Path, shims: Path) -> None:
    wrapper(shims.parent / "versions" / "3.12.9" / "bin" / "python3.12")
    newest = executable(shims.parent / "versions" / "3.12.11" / "bin" / "python3.12", FAILING_SHIM)
    assert find(tmp_path, shims) == (0, REAL, "")
    executable(newest, '#!/bin/sh\necho "$0"\n')
    assert find(tmp_path, shims) == (0, str(newest), "")


def test_a_python_that_warns_is_accepted_and_nonsense_is_not(tmp_path: Path) -> None:
    nonsense = executable(tmp_path / "first" / "python3.12", "#!/bin/sh\necho hello\n").parent
    warns = executable(
        tmp_path / "bin" / "python3.12", f'#!/bin/sh\necho "bad locale" >&2\nexec "{REAL}" "$@"\n'
    ).parent
    assert find(tmp_path, nonsense, warns) == (0, REAL, "")


@pytest.mark.parametrize("location", ["PYENV_ROOT", "HOME", "uv", "python3"])
def test_other_locations(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    env: dict[str, str] = {}
    if location == "PYENV_ROOT":
        env[location] = str(tmp_path / "root")
        wrapper(tmp_path / "root" / "versions" / "3.12.1" / "bin" / "python3.12")
    elif location == "HOME":
        wrapper(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3.12")
    elif location == "uv":
        managed = wrapper(tmp_path / "managed" / "python3.12")
        # Without --system uv would return .venv's Python, which may be about to be replaced.
        executable(
            folder / "uv", f'#!/bin/sh\n[ "$*" = "python find --no-project --system 3.12" ] && echo "{managed}"\n'
        )
    else:
        wrapper(folder / "python3")
    assert find(tmp_path, folder, **env) == (0, REAL, "")


def test_the_error_lists_candidates_and_ways_to_install(tmp_path: Path, shims: Path) -> None:
    old = executable(tmp_path / "bin" / "python3", OTHER_VERSION)
    code, out, err = find(tmp_path, shims, old.parent)
    assert (code, out) == (1, "")
    assert f"{shims}/python3.12 does not run" in err
    assert f"{old} is cpython 3.11" in err
    for command in (
        "apt-get install python3.12 python3.12-venv",
        "uv python install 3.12",
        "pyenv install 3.12",
        "docker/",
    ):
        assert command in err
