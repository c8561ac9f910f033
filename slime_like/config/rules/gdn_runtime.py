"""Installed packages and tools of this machine that optional kernels need, found without importing the packages."""

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
FLASHINFER = "flashinfer-python"
PACKAGES = ("torch", "triton", "fla-core", "flash-qla", "tilelang", FLASHINFER)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Device, installed versions and compiler of a machine, on which optional kernels depend."""

    device: str  # cpu | cuda
    capability: tuple[int, int] | None  # compute capability of the GPU; None: unknown
    cuda: Version | None  # CUDA version of torch's build; None: torch is missing or was built without CUDA
    versions: Mapping[str, Version | None]  # of each of PACKAGES; None: not installed
    nvcc: bool


def runtime(device: str, capability: tuple[int, int] | None) -> Runtime:
    """Return this machine's runtime. ``capability`` is the compute capability of its GPU."""
    return Runtime(device, capability, torch_cuda(), {name: installed_version(name) for name in PACKAGES}, has_nvcc())


def installed_version(package: str) -> Version | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def version(text: str) -> Version:
    """Return the numbers of the release part of a version, such as (2, 14, 1) for ``2.14.1+cu130``; () if there are none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def torch_cuda() -> Version | None:
    """Return the CUDA version in the version.py of the installed torch.

    It is None if torch is not installed or was built without CUDA.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", source.read_text(), re.MULTILINE) if source.exists() else None
    return version(match[1]) if match else None


def has_nvcc() -> bool:
    """Return whether nvcc exists in the places that TileLang searches."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if shutil.which("nvcc") or any(home and (Path(home) / "bin" / "nvcc").exists() for home in homes):
        return True
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.name == "nvcc" for file in files)
