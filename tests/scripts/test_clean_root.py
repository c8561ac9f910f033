"""Every line of docker/Dockerfile for CPUs, executed in a clean Debian root; then its entry point with the quickstart's plan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.util.deadline import scale

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"  # of the base image for CPUs
LIBRARIES = "libffi8,libreadline8,libsqlite3-0,libssl3"  # libraries of the base image that Python needs
SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
SERVER = re.compile(r"^(?:URIs:|deb)\s+(?:\[[^]]*\]\s+)?(https?://\S+/debian)/?(?:\s|$)", re.MULTILINE)
BOOTSTRAP_S, BUILD_S = 300, 900
# Namespaces that end with a killed command, so that none of its mounts and processes remains.
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")

pytestmark = pytest.mark.slow


@dataclass(frozen=True, slots=True)
class Build:
    """Root after the lines of the Dockerfile, and their output."""

    folder: Path
    code: int
    output: str


def debian_server() -> str | None:
    """Return the package server of this machine's Debian; None on another distribution."""
    texts = (path.read_text() for path in SOURCES if path.is_file())
    return next((match[1] for text in texts if (match := SERVER.search(text))), None)


@pytest.fixture(scope="module")
def clean_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Create a Debian root. Skip, with the reason, on machines where that is not possible."""
    server = debian_server()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or server is None or sys.base_prefix == "/usr":
        pytest.skip("needs root, debootstrap, and Debian with a Python outside /usr: only the job `image` builds here")
    folder = tmp_path_factory.mktemp("root")
    words = [*NAMESPACES, "debootstrap", "--variant=minbase", f"--include={LIBRARIES}", SUITE, folder, server]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=BOOTSTRAP_S * scale())
    except subprocess.TimeoutExpired:
        pytest.skip(f"debootstrap has created no root within {BOOTSTRAP_S * scale():.0f} s")
    if result.returncode:
        pytest.skip(f"debootstrap cannot create a root: {(result.stdout + result.stderr)[-300:]}")
    folder.chmod(0o755)  # the image's user has to be able to search its root
    yield folder
    subprocess.run(["rm", "--recursive", folder], check=True)  # 130,000 files, in less time than by shutil


@pytest.fixture(scope="module")
def build(clean_root: Path) -> Build:
    """Execute the Dockerfile without compiling bytecode, with links to the cache of uv if it is on the root's file system."""
    uv = Path(sys.executable).with_name("uv")
    cache = Path(subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip())
    same_file_system = cache.is_dir() and cache.stat().st_dev == clean_root.stat().st_dev
    links = ["--uv-cache", cache] if same_file_system else []
    command = [sys.executable, ROOT / "scripts" / "image_root.py", clean_root, "--no-bytecode", *links]
    result = subprocess.run(
        [*command, "--python", sys.base_prefix],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S * scale(),
    )
    return Build(clean_root, result.returncode, result.stdout)


def in_root(folder: Path, *words: str) -> str:
    """Return the output of a command in the root, as the image's user."""
    command = ["chroot", "--userspec=10001:10001", folder, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60 * scale()).stdout


def test_every_line_of_the_dockerfile_runs_in_a_clean_root(build: Build) -> None:
    assert build.code == 0, build.output[-3000:]
    assert [line for line in build.output.splitlines() if line.startswith("== RUN")] == [
        f"== RUN bash scripts/image_steps.sh {step}" for step in ("system", "dependencies", "code")
    ]
    before, _, after = build.output.partition("== bash docker/entrypoint.sh")
    assert re.search(r"^slime_like .*, torch \d.*, megatron-core \d.*, sglang \d.*, device cpu", after, re.MULTILINE)
    assert "placement  colocated on cpu" in after, after[-3000:]
    assert "no C kernels on this CPU" not in before


def test_the_image_has_its_user_and_packages_and_nothing_else_of_root(build: Build) -> None:
    root = build.folder
    assert in_root(root, "id", "-un").strip() == "slime_like"
    for program in ("gcc", "git"):
        assert in_root(root, program, "--version"), program
    for path in ("usr/bin/ps", "usr/sbin/update-ca-certificates"):
        assert (root / path).exists(), path
    for writable_folder in (
        "/slime_like/runs",
        "/slime_like/scripts",
        "/slime_like/.venv",
        "/home/slime_like/.cache/uv",
    ):
        in_root(root, "touch", f"{writable_folder}/file")
    assert not any((root / "var/lib/apt/lists").iterdir()), "the image would contain the lists of packages"
