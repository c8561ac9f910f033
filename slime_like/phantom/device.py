"""Environment of a process that runs on phantom GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slime_like.phantom.build import library

GIB = 2**30


@dataclass(frozen=True, slots=True)
class PhantomGpu:
    """Phantom GPUs of one process, which has their full memory to itself.

    The process can open the memory of other processes by CUDA IPC.
    """

    memory_bytes: int = 80 * GIB
    num_devices: int = 1
    capability: tuple[int, int] = (9, 0)
    context_bytes: int = 500 * 2**20  # memory of a process on each GPU, outside of torch's allocator
    host_limit: int | None = (
        None  # bytes of the largest host tensor with values; larger ones take no memory. None: all have values
    )

    def environment(self) -> dict[str, str]:
        """Return the variables that put a new process on these GPUs. Raises ``ConfigError`` as ``library`` does."""
        path = library()
        folder = str(path.parent)
        return {
            "LD_PRELOAD": _joined(str(path), os.environ.get("LD_PRELOAD")),
            "LD_LIBRARY_PATH": _joined(folder, os.environ.get("LD_LIBRARY_PATH")),
            "PATH": _joined(folder, os.environ.get("PATH")),  # nvidia-smi
            "TRITON_LIBCUDA_PATH": folder,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.num_devices))),
            "TORCH_NCCL_ENABLE_MONITORING": "0",  # a thread that watches for hangs, which do not occur
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more would be processes that each import torch
            "PHANTOM_GPU_MEMORY": str(self.memory_bytes),
            "PHANTOM_GPU_DEVICES": str(self.num_devices),
            "PHANTOM_GPU_CAPABILITY": "{}{}".format(*self.capability),
            "PHANTOM_GPU_CONTEXT": str(self.context_bytes),
            "PHANTOM_GPU_HOST_LIMIT": "" if self.host_limit is None else str(self.host_limit),
        }


def _joined(first: str, other_names: str | None) -> str:
    return f"{first}:{other_names}" if other_names else first
