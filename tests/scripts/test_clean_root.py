"""The image's distribution packages and user, in a clean Debian root; the nightly CI builds complete images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.util.deadline import scale

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"  # of the base image for CPUs
SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
SERVER = re.compile(r"^(?:URIs:|deb)\s+(?:\[[^]]*\]\s+)?(https?://\S+/debian)/?(?:\s|$)", re.MULTILINE)
BOOTSTRAP_S, STEP_S = 300, 300
# Nothing that a killed command has mounted or started remains.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")

pytestmark = pytest.mark.slow


def debian_server() -> str | None:
    """Return the package server of this machine's Debian; None on another distribution."""
    texts = (path.read_text() for path in SOURCES if path.is_file())
    return next((match[1] for text in texts if (match := SERVER.search(text))), None)


@pytest.fixture(scope="module")
def clean_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a Debian root. Skip, with the reason, on machines where that is not possible."""
    server = debian_server()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or server is None:
        pytest.skip(
            "needs root, debootstrap and a Debian machine: only the nightly job `image` executes the RUN lines here"
        )
    folder = tmp_path_factory.mktemp("root")
    words = [*NAMESPACES, "debootstrap", "--variant=minbase", SUITE, folder, server]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=BOOTSTRAP_S * scale())
    except subprocess.TimeoutExpired:
        pytest.skip(f"debootstrap has created no root within {BOOTSTRAP_S * scale():.0f} s")
    if result.returncode:
        pytest.skip(f"debootstrap cannot create a root: {(result.stdout + result.stderr)[-300:]}")
    folder.chmod(0o755)  # the image's user has to be able to search its root
    yield folder
    shutil.rmtree(folder)


def in_root(folder: Path, *words: str) -> str:
    """Return the output of a command in the root, as the image's user."""
    command = ["chroot", "--userspec=10001:10001", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 * scale()).stdout


def test_the_system_step_runs_in_a_clean_root(clean_root: Path) -> None:
    result = subprocess.run(
        [*NAMESPACES, "bash", ROOT / "scripts" / "image_steps.sh", "root-system", clean_root],
        env={**os.environ, "SLIME_LIKE_DEVICE": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S * scale(),
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert in_root(clean_root, "id", "-un").strip() == "slime_like"
    for program in ("gcc", "git"):
        assert in_root(clean_root, program, "--version"), program
    assert (clean_root / "usr/bin/ps").exists()
    for writable_folder in ("/slime_like/runs", "/slime_like/scripts", "/home/slime_like/.cache/uv"):
        in_root(clean_root, "touch", f"{writable_folder}/file")
    assert not any((clean_root / "var/lib/apt/lists").iterdir()), "the image would contain the lists of packages"
