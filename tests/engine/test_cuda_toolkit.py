"""Start of an engine on a GPU: toolkit and runtime from NVIDIA's wheels, imports of spawned workers, dying workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import cuda_toolkit
from slime_like.rollout.engine import environment as engine_environment
from slime_like.rollout.engine.cuda_toolkit import library_environment, toolkit_environment
from slime_like.rollout.engine.main import EngineLaunch
from slime_like.util.deadline import scale


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the files of NVIDIA's wheels, alone on ``sys.path``; no toolkit is installed."""
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


def test_flashinfer_can_link_with_the_driver(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel.is_dir()
    monkeypatch.setattr(cuda_toolkit, "DRIVER_FOLDERS", (str(tmp_path / "driver"),))
    for folder in (tmp_path / "driver", tmp_path / "other"):
        folder.mkdir()
    environment = {"PATH": "/nowhere", "LD_LIBRARY_PATH": f":{tmp_path / 'other'}"}
    library = Path(toolkit_environment(environment)["CUDA_HOME"]) / "lib64" / "stubs" / "libcuda.so"
    assert not library.exists(), "this machine has no driver"
    (tmp_path / "driver" / "libcuda.so.1").touch()
    toolkit_environment(environment)
    assert library.resolve() == tmp_path / "driver" / "libcuda.so.1"
    (tmp_path / "driver" / "libcuda.so.1").rename(tmp_path / "other" / "libcuda.so.1")
    toolkit_environment(environment)
    assert library.resolve() == tmp_path / "other" / "libcuda.so.1", "another node shares the folder"
    assert sorted(path.name for path in library.parent.iterdir()) == ["libcuda.so"]


def test_an_installed_toolkit_is_used(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        assert toolkit_environment({name: "/opt/cuda", "PATH": "/nowhere"}) == {}
    assert toolkit_environment({"PATH": str(wheel / "bin")}) == {}
    monkeypatch.setattr(cuda_toolkit, "SYSTEM", tmp_path)
    assert toolkit_environment({"PATH": "/nowhere"}) == {}


@pytest.mark.parametrize("missing", ["bin/nvcc", "lib/libcudart.so.13"])
def test_incomplete_wheels_are_not_a_toolkit(wheel: Path, missing: str) -> None:
    (wheel / missing).unlink()
    assert toolkit_environment({"PATH": "/nowhere"}) == {}


SPEC = EngineSpec("model", "cuda", "bfloat16", 1, 64, 0, "engine.log", 10, 10)


def test_a_preloaded_library_finds_the_runtime_of_the_wheels(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang preloads torch_memory_saver into its schedulers, which would fail to load without the CUDA runtime."""
    folder = str(wheel / "lib")
    assert library_environment({}) == {"LD_LIBRARY_PATH": folder}
    assert library_environment({"LD_LIBRARY_PATH": "/opt/lib"}) == {"LD_LIBRARY_PATH": f"/opt/lib:{folder}"}
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(engine_environment, "interface_environment", lambda host: {})  # resolves the host's name
    for releases, expected in ((True, folder), (False, None)):
        environment = engine_environment.child_environment(replace(SPEC, releases_memory=releases), "/scratch")
        assert environment.get("LD_LIBRARY_PATH") == expected
    (wheel / "lib/libcudart.so.13").unlink()
    assert library_environment({}) == {}


@pytest.mark.usefixtures("wheel")
def test_the_server_of_an_engine_on_a_gpu_has_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang compiles the activation of every MLP, and exits if there is no compiler."""
    monkeypatch.setattr(engine_environment, "interface_environment", lambda host: {})
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    homes = [
        engine_environment.child_environment(replace(SPEC, device=device), "/scratch").get("CUDA_HOME")
        for device in ("cuda", "cpu")
    ]
    assert homes == [toolkit_environment({"PATH": "/nowhere"})["CUDA_HOME"], None]


DEAD_WORKER = """
import multiprocessing, time
from slime_like.rollout.engine import main

def serve(arguments):
    multiprocessing.Process(target=time.sleep, args=(600,)).start()  # as SGLang's detokenizer
    raise RuntimeError("rank 0 died")

main.serve, main.server_arguments = serve, lambda launch: {}
main.main()
"""


def test_a_server_whose_worker_died_during_the_start_ends() -> None:
    """Otherwise the server would wait for its other workers, and the run for it until rollout.start_deadline_s."""
    process = subprocess.Popen(
        [sys.executable, "-c", DEAD_WORKER],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stderr is not None
    try:
        process.stdin.write(json.dumps(asdict(EngineLaunch(SPEC, "key", "127.0.0.1", 1))) + "\n")
        process.stdin.flush()
        assert process.wait(60 * scale()) == 1
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    assert "RuntimeError: rank 0 died" in process.stderr.read()


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


@pytest.mark.slow
def test_a_spawned_worker_does_not_import_megatron() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SPAWN], capture_output=True, text=True, timeout=120 * scale(), check=False
    )
    assert result.stdout.startswith("blocked: import of megatron halted"), result.stdout + result.stderr
