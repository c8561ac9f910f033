"""Lock files: pin with hashes every requirement of the ``*.in`` files; the CPU lock has no CUDA kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts.shell import ROOT

REQUIREMENTS = ROOT / "scripts" / "requirements"
INPUTS = {"cpu": ("runtime.in", "dev.in"), "gpu": ("runtime.in", "gpu.in", "dev.in")}


def lines(path: Path) -> list[str]:
    return [text for line in path.read_text().splitlines() if (text := line.partition("#")[0].strip())]


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def pins(device: str) -> dict[str, str]:
    text = (REQUIREMENTS / f"{device}.lock").read_text()
    return {name_of(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)==(\S+) ", text, re.MULTILINE)}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_input_is_pinned(device: str) -> None:
    versions = pins(device)
    required = [requirement for file in INPUTS[device] for requirement in lines(REQUIREMENTS / file)]
    assert not {name_of(requirement) for requirement in required} - versions.keys()
    exact = {name_of(r): r.partition("==")[2] for r in required if "==" in r and not r.endswith("*")}
    assert exact and exact == {name: versions[name] for name in exact}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_pin_has_a_hash(device: str) -> None:
    text = (REQUIREMENTS / f"{device}.lock").read_text()
    blocks = re.split(r"^(?=\S+==)", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins(device)) > 100
    assert not [block.splitlines()[0] for block in blocks if "--hash=sha256:" not in block]


def test_cpu_lock_has_none_of_the_overridden_wheels() -> None:
    overridden = {name_of(line) for line in lines(REQUIREMENTS / "cpu.overrides")}
    assert overridden and not overridden & pins("cpu").keys()
    assert overridden <= pins("gpu").keys(), "an override without effect"


def test_gpu_kernels_are_in_the_gpu_lock_only() -> None:
    # flash-linear-attention breaks transformers' Qwen3-Next if it is importable without a GPU.
    assert not {name_of(line) for line in lines(REQUIREMENTS / "gpu.in")} & pins("cpu").keys()


def test_tests_on_a_cpu_run_the_kernels_of_the_gpu_set() -> None:
    kernels = pins("fla_interpreter")
    assert "fla-core" in kernels and kernels.items() <= pins("gpu").items()
    assert {name_of(line) for line in lines(REQUIREMENTS / "fla_interpreter.in")} == kernels.keys()


def test_both_locks_agree_on_common_requirements() -> None:
    shared = {name_of(line) for line in lines(REQUIREMENTS / "runtime.in") + lines(REQUIREMENTS / "dev.in")}
    cpu, gpu = pins("cpu"), pins("gpu")
    assert {name: cpu[name] for name in shared} == {name: gpu[name] for name in shared}


def test_compiler_and_headers_have_the_cuda_version_of_torch() -> None:
    """With headers of another version, nvcc refuses every source that includes cub, as SGLang's expert kernels do."""
    versions, parts = pins("gpu"), ("nvcc", "crt", "cccl", "nvrtc", "runtime")
    releases = {name: versions[f"nvidia-cuda-{name}"].split(".")[:2] for name in parts}
    releases["nvvm"] = versions["nvidia-nvvm"].split(".")[:2]
    assert set(map(tuple, releases.values())) == {("13", "0")}, releases
