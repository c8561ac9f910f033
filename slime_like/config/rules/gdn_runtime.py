"""What this machine offers to the kernels of Gated DeltaNet: read from package metadata and the driver, nothing imported."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

Version = tuple[int, ...]
PACKAGES = ("torch", "triton", "fla-core", "flash-qla", "tilelang")


@dataclass(frozen=True, slots=True)
class Runtime:
    """One machine. None: not known here (capability, cuda) or not installed (versions)."""

    device: str  # cpu | cuda
    capability: tuple[int, int] | None
    cuda: Version | None  # torch was built for
    versions: Mapping[str, Version | None]
    nvcc: bool


def runtime(device: str, capability: tuple[int, int] | None) -> Runtime:
    """This machine, with the compute capability of its GPU as the caller knows it."""
    return Runtime(device, capability, torch_cuda(), {name: installed(name) for name in PACKAGES}, has_nvcc())


def installed(package: str) -> Version | None:
    """Version of an installed distribution; None where there is none."""
    try:
        return version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def version(text: str) -> Version:
    """``2.14.1+cu130`` -> (2, 14, 1): the release, without what follows it."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def torch_cuda() -> Version | None:
    """The CUDA version that the installed torch was built for, from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py")
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", source.read_text(), re.MULTILINE) if source.exists() else None
    return version(found[1]) if found else None


def has_nvcc() -> bool:
    """Whether there is an nvcc where TileLang looks for one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if shutil.which("nvcc") or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes):
        return True
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.name == "nvcc" for file in files)
