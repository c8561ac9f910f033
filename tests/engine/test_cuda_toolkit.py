"""CUDA_HOME of engines on a machine without a CUDA toolkit, made of NVIDIA's wheels, and imports of spawned workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.rollout.engine import cuda_toolkit
from slime_like.rollout.engine.cuda_toolkit import toolkit_environment
from slime_like.util.deadline import scale


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of NVIDIA's wheels, the only one that is importable; no toolkit is installed."""
    home = tmp_path / "site" / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudadevrt.a"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", tmp_path / "no_toolkit")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return home


def test_the_wheels_become_a_toolkit(wheel: Path) -> None:
    environment = toolkit_environment({"PATH": "/nowhere"})
    home = Path(environment["CUDA_HOME"])
    assert (home / "bin" / "nvcc").resolve() == wheel / "bin" / "nvcc"
    assert (home / "include" / "cuda_runtime.h").exists() and (home / "nvvm" / "bin" / "cicc").exists()
    assert (home / "lib64" / "libcudart.so").resolve() == wheel / "lib" / "libcudart.so.13"
    assert (home / "lib64" / "libcudadevrt.a").exists()
    assert toolkit_environment({"PATH": "/nowhere"}) == environment, "SGLang would compile its kernels in each run"


def test_an_installed_toolkit_is_used(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        assert toolkit_environment({name: "/opt/cuda", "PATH": "/nowhere"}) == {}
    assert toolkit_environment({"PATH": str(wheel / "bin")}) == {}
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", tmp_path)
    assert toolkit_environment({"PATH": "/nowhere"}) == {}


@pytest.mark.parametrize("missing", ["bin/nvcc", "lib/libcudart.so.13"])
def test_incomplete_wheels_are_no_toolkit(wheel: Path, missing: str) -> None:
    (wheel / missing).unlink()
    assert toolkit_environment({"PATH": "/nowhere"}) == {}


SPAWN = """
import importlib, multiprocessing, sys
from slime_like.rollout.engine import main
if __name__ == "__main__":
    sys.modules["__main__"] = main  # as python -m does
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            pool.apply(importlib.import_module, ("megatron",))
        except ModuleNotFoundError as error:
            print("blocked:", error)
"""


def test_a_spawned_worker_does_not_import_megatron() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SPAWN], capture_output=True, text=True, timeout=120 * scale(), check=False
    )
    assert result.stdout.startswith("blocked: import of megatron halted"), result.stdout + result.stderr
