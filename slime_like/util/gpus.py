"""The NVIDIA GPUs of this machine, asked of the driver without torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slime_like.util.deadline import Deadline

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
GPU_QUERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; ``capability`` such as (9, 0), None where only its name could be read."""

    name: str
    capability: tuple[int, int] | None = None


def installed_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the machine, by nvidia-smi or, where that is missing, by the driver's /proc entries."""
    try:
        limit = Deadline("driver", "GPU query", GPU_QUERY_SECONDS).remaining("nvidia-smi")
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=limit, check=True)
        return tuple(parse(line) for line in answer.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError):
        entries = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        return tuple(Gpu(_model(entry.read_text())) for entry in entries)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves of them."""
    return visible(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse(line: str) -> Gpu:
    """``NVIDIA H100 80GB HBM3, 9.0`` of nvidia-smi."""
    name, _, capability = line.rpartition(",")
    major, dot, minor = capability.strip().partition(".")
    if not (name and dot and major.isdigit() and minor.isdigit()):
        return Gpu(line.strip())
    return Gpu(name.strip(), (int(major), int(minor)))


def visible[T](items: tuple[T, ...], variable: str | None) -> tuple[T, ...]:
    """What ``CUDA_VISIBLE_DEVICES=variable`` leaves of ``items``; CUDA stops at the first entry that names none."""
    if variable is None:
        return items
    chosen: list[T] = []
    for entry in (text.strip() for text in variable.split(",")):
        if entry.isdigit() and int(entry) < len(items):
            chosen.append(items[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and items:
            chosen.append(items[0])
        else:
            break
    return tuple(chosen)


def _model(information: str) -> str:
    fields = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    return fields.get("Model", "NVIDIA GPU").strip()
