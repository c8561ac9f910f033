"""NVIDIA GPUs of this machine, queried without torch."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from slime_like.util.deadline import Deadline

GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader")
GPU_QUERY_SECONDS = 20.0
MIG = "MIG"  # suffix of the name of a GPU's slice


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; ``capability`` is e.g. (9, 0). A value is None if it could not be read."""

    name: str
    capability: tuple[int, int] | None = None
    num_bytes: int | None = None  # total memory


def installed_gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the machine, from nvidia-smi or, if that fails, from the driver's /proc entries."""
    try:
        limit = Deadline("driver", "GPU query", GPU_QUERY_SECONDS).remaining("nvidia-smi")
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=limit, check=True)
        return tuple(parse(line) for line in answer.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError):
        entries = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        return tuple(Gpu(_model(entry.read_text())) for entry in entries)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` allows.

    The ``num_bytes`` of a MIG slice is None, because nvidia-smi does not report it.
    """
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible(installed_gpus(), variable)
    if variable is None:
        return gpus
    entries = [entry.strip() for entry in variable.split(",")]  # ``visible`` stops at the first invalid one
    return tuple(
        replace(gpu, name=f"{gpu.name} {MIG}", num_bytes=None) if entry.startswith("MIG-") else gpu
        for gpu, entry in zip(gpus, entries, strict=False)
    )


def parse(line: str) -> Gpu:
    """Parse a line of nvidia-smi, such as ``NVIDIA H100 80GB HBM3, 81559 MiB, 9.0``.

    A memory size or capability in another form, such as [N/A], becomes None. A line of fewer fields is taken as the name.
    """
    fields = [field.strip() for field in line.rsplit(",", 2)]
    if len(fields) < 3:
        return Gpu(line.strip())
    name, memory, capability = fields
    major, dot, minor = capability.partition(".")
    is_known = dot and major.isdigit() and minor.isdigit()
    number, _, unit = memory.partition(" ")
    num_bytes = int(number) * 2**20 if number.isdigit() and unit == "MiB" else None
    return Gpu(name, (int(major), int(minor)) if is_known else None, num_bytes)


def visible[T](items: tuple[T, ...], variable: str | None) -> tuple[T, ...]:
    """Return the ``items`` that ``variable``, the value of ``CUDA_VISIBLE_DEVICES``, selects; None selects all.

    As in CUDA, an invalid entry and all entries after it are ignored, and a repeated entry hides all items. A UUID is not looked
    up: it selects the first item.
    """
    if variable is None:
        return items
    visible_items: list[T] = []
    earlier: set[str] = set()
    for entry in (text.strip() for text in variable.split(",")):
        number_or_uuid = str(int(entry)) if entry.isdigit() else entry
        if number_or_uuid in earlier:
            return ()
        earlier.add(number_or_uuid)
        if entry.isdigit() and int(entry) < len(items):
            visible_items.append(items[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and items:
            visible_items.append(items[0])
        else:
            break
    return tuple(visible_items)


def _model(information: str) -> str:
    fields = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    return fields.get("Model", "NVIDIA GPU").strip()
