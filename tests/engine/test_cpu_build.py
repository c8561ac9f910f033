"""Compilation of the C kernels: into a private cache, completely or not at all, with a clear error on failure."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slime_like.util import c_build
from slime_like_plugins.plugin_names import CPU_KERNELS_VARIABLE
from slime_like_plugins.sglang_cpu import build as cpu_build
from slime_like_plugins.sglang_cpu import selection
from slime_like_plugins.sglang_cpu.build import BuildError, build, cache_folder, object_name, run_compiler
from slime_like_plugins.sglang_cpu.kernels import TorchKernels
from slime_like_plugins.sglang_cpu.selection import choose

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, cpu_build.COMPILERS)), reason="no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "slime_like" / "cpu_kernels"


@pytest.fixture
def short_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a source that compiles quickly."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "kernels.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(cpu_build, "SOURCE", folder)
    return folder / "kernels.c"


def fake_compiler(folder: Path, body: str) -> Path:
    """Write an executable called cc."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@needs_compiler
def test_a_build_is_reused_until_its_source_changes(cache: Path, short_source: Path) -> None:
    library = build().path
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [library.name for library in cache.iterdir()] == [library.name]  # no partial file is left
    build_time = library.stat().st_mtime_ns
    assert build().path == library
    assert library.stat().st_mtime_ns == build_time
    short_source.write_text("int two(void) { return 2; }\n")
    assert build().path != library


@pytest.mark.parametrize(
    ("cpuinfo", "word"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n", "avx2"),
        ("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40\n", "sve"),
    ],
)
def test_the_identity_of_a_cpu_has_its_features(cpuinfo: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    assert word in c_build.cpu_identity() and "processor" not in c_build.cpu_identity()


def test_the_object_name_depends_on_the_cpu(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = str(fake_compiler(tmp_path, "exit 1"))
    name = object_name(compiler)
    monkeypatch.setattr(c_build, "cpu_identity", lambda: "another")
    assert object_name(compiler) != name


def test_a_cache_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(BuildError, match=r"is not private to this user: make it yours"):
        cache_folder()


def test_a_failing_compiler_is_quoted_and_leaves_no_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, "echo 'kernels.c:1: no such thing' >&2; exit 1")))
    with pytest.raises(BuildError, match=r"cc could not compile the kernels' source: kernels.c:1: no such thing"):
        build()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("launcher", ["", "ccache ", "/usr/bin/sccache "])
def test_a_launcher_before_the_compiler_is_skipped(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path, "exit 0")
    monkeypatch.setenv("CC", f"{launcher}{compiler} -m64")
    assert c_build.find_compiler() == str(compiler)


@needs_compiler
def test_a_compiler_without_openmp_is_sufficient(cache: Path, short_source: Path, tmp_path: Path) -> None:
    compiler = fake_compiler(
        tmp_path, f'case "$*" in *-fopenmp*) exit 1;; esac\nexec {shutil.which("cc") or shutil.which("gcc")} "$@"'
    )
    run_compiler(str(compiler), tmp_path / "out.so")
    assert (tmp_path / "out.so").is_file()


def test_without_a_compiler_torch_decodes_and_c_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    kernels = choose("auto")
    assert isinstance(kernels.leaf, TorchKernels)
    assert kernels.c is None
    assert kernels.text == "torch kernels, no C kernels: no C compiler (cc, gcc, clang) on PATH: apt-get install gcc"
    with pytest.raises(
        SystemExit,
        match=r"rollout\.cpu_kernels=c: no C compiler .*; to decode with torch, set rollout\.cpu_kernels=auto",
    ):
        choose("c")


@needs_compiler
@pytest.mark.parametrize(("setting", "latent", "in_c"), [("auto", 512, False), ("auto", 511, True), ("c", 512, True)])
def test_auto_attends_to_wide_latents_in_torch(
    setting: str, latent: int, in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, setting)
    monkeypatch.setattr(selection, "selected", lambda: choose(setting))
    assert (selection.latent_kernels(latent) is not None) == in_c


def test_off_and_torch_need_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert choose("off").leaf is None
    assert isinstance(choose("torch").leaf, TorchKernels)
    with pytest.raises(SystemExit, match="'fast' is not one of auto, c, torch, off"):
        choose("fast")


def test_a_compiler_that_fails_silently_is_named_with_its_exit_code(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, "exit 3")
    with pytest.raises(BuildError, match=r"could not compile the kernels' source: exit code 3 without a message"):
        run_compiler(str(compiler), tmp_path / "out.so")


@needs_compiler
def test_a_full_disk_is_a_build_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(BuildError, match=r"kernels' source cannot be compiled into .*: .*No space left on device"):
        build()


def test_the_build_command_needs_no_installed_package_and_names_a_missing_compiler(cache: Path) -> None:
    command = [sys.executable, "-S", "-m", "slime_like_plugins.sglang_cpu.build"]  # -S: without site-packages
    environment = {"PATH": "/nowhere", "PYTHONPATH": "plugins:.", "XDG_CACHE_HOME": str(cache)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "no C compiler (cc, gcc, clang) on PATH: apt-get install gcc" in result.stderr
