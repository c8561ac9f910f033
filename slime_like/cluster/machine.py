"""What this machine has, asked without torch: GPUs from the driver, memory and cores from Linux and its cgroups."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slime_like.deadline import Deadline

GPU_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
GPU_QUERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as far as a plan cares. Example: ``Machine(0, 2, 24 * 2**30, ())`` is a small laptop."""

    num_gpus: int
    cpu_count: int
    memory_bytes: int
    gpu_names: tuple[str, ...]


def probe_machine() -> Machine:
    """This machine, within ``CUDA_VISIBLE_DEVICES``, CPU affinity and cgroup limits."""
    gpus = visible(gpu_names(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(len(gpus), cpu_count(), memory_bytes(), gpus)


def gpu_names() -> tuple[str, ...]:
    """One name per GPU of the machine, by nvidia-smi or, where that is missing, by the driver's /proc entries."""
    try:
        limit = Deadline("driver", "GPU query", GPU_QUERY_SECONDS).remaining("nvidia-smi")
        answer = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=limit, check=True)
        return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError):
        entries = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        return tuple(_model(entry.read_text()) for entry in entries)


def _model(information: str) -> str:
    fields = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    return fields.get("Model", "NVIDIA GPU").strip()


def visible(names: tuple[str, ...], variable: str | None) -> tuple[str, ...]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves; CUDA stops at the first entry that names none."""
    if variable is None:
        return names
    chosen: list[str] = []
    for entry in (text.strip() for text in variable.split(",")):
        if entry.isdigit() and int(entry) < len(names):
            chosen.append(names[int(entry)])
        elif entry.startswith(("GPU-", "MIG-")) and names:
            chosen.append(names[0])
        else:
            break
    return tuple(chosen)


def cpu_count() -> int:
    """Cores this process may use: its affinity, or the cgroup's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(1, cores)


def memory_bytes() -> int:
    """Main memory, or the cgroup's limit where that is less."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total = int(lines["MemTotal"].split()[0]) * 1024
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (text := _read(path).strip()).isdigit():
            total = min(total, int(text))
    return total


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
