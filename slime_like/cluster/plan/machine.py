"""Resources of a described machine, or of this one: GPUs from NVIDIA's driver, memory and cores from Linux and its cgroups.

This module does not import torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.rules.gdn_runtime import Runtime, runtime
from slime_like.errors import ConfigError
from slime_like.hardware import CORES_PER_GPU
from slime_like.util.cgroups import cpu_quota, memory_limit
from slime_like.util.gpus import visible_gpus


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine. Example: ``Machine(0, 2, 24 * 2**30, ())`` is a small laptop."""

    num_gpus: int  # GPUs of all nodes
    cpu_count: int  # CPUs of one node
    memory_bytes: int  # main memory of one node; on a cluster without GPUs, of all nodes
    gpu_names: tuple[str, ...]  # names of the GPUs: one per GPU, one per node with GPUs, or one for all
    kernels: Runtime | None = None  # runtime of optional kernels; None: not probed
    is_local: bool = True  # False: nodes of a cluster, or a machine that is only described
    is_joined: bool = False  # nodes of a Ray cluster that this process, the driver of the run, has joined
    nodes: int = 1
    gpu_bytes: tuple[int, ...] = ()  # memory of each GPU as the driver reports it; (): not reported
    numa_nodes: int = 1  # NUMA nodes with cores that the run may use, on one of its nodes

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of this process if the machine is this one or a joined Ray cluster, otherwise empty.

        The nodes of a joined cluster usually have the same variables. Those of any other machine are unknown.
        """
        return os.environ if self.is_local or self.is_joined else {}


def probe_machine() -> Machine:
    """Return the resources of this machine within ``CUDA_VISIBLE_DEVICES``, CPU affinity and cgroup limits."""
    gpus = visible_gpus()
    kernels = runtime("cuda" if gpus else "cpu", gpus[0].capability if gpus else None)
    sizes = tuple(gpu.num_bytes for gpu in gpus if gpu.num_bytes is not None)
    return Machine(
        num_gpus=len(gpus),
        cpu_count=cpu_count(),
        memory_bytes=memory_bytes(),
        gpu_names=tuple(gpu.name for gpu in gpus),
        kernels=kernels,
        gpu_bytes=sizes if len(sizes) == len(gpus) else (),
        numa_nodes=numa_nodes(),
    )


def described_machine(text: str) -> Machine:
    """Return the machine described by ``GPUS``, ``GPUSxNAME``, ``NODESxGPUS`` or ``NODESxGPUSxNAME``.

    Each node has 8 cores per GPU and unlimited main memory. Raises ``ConfigError`` if the text is malformed.
    """
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,4})(?:x([^\dx].*))?", text)
    if match is None or (match[1] and len(match[2]) > 3):  # 8x3090 names a GPU, not 3090 GPUs per node
        raise ConfigError(
            f"--plan-for {text}: write the number of GPUs, optionally with their name: --plan-for 8xH200, or 4x8xH200 for "
            "four nodes; the name begins with a letter"
        )
    nodes, gpus = int(match[1] or 1), int(match[2])
    names = (match[3] or "GPU",)
    return Machine(nodes * gpus, CORES_PER_GPU * gpus, 2**62, names, is_local=False, nodes=nodes)


def cpu_count() -> int:
    """Return the number of usable cores: CPU affinity, or the cgroups' CPU quota if that is less."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def numa_nodes(devices: Path = Path("/sys/devices/system/node")) -> int:
    """Return the number of NUMA nodes with cores on which this process may run; 1 if Linux does not list NUMA nodes."""
    usable_cpus = os.sched_getaffinity(0)
    return sum(not usable_cpus.isdisjoint(_cores(_read(str(file)))) for file in devices.glob("node[0-9]*/cpulist")) or 1


def _cores(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0-3,8``."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def memory_bytes() -> int:
    """Return the size of main memory in bytes, or the cgroups' limit if that is less."""
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, limit = int(lines["MemTotal"].split()[0]) * 1024, memory_limit()
    return total if limit is None else min(total, limit)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
