"""Compilation of ``csrc`` into the library that replaces CUDA's. This module does not import torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from slime_like.errors import ConfigError
from slime_like.util import c_build
from slime_like.util.c_build import BuildError, Recipe

SOURCE = Path(__file__).parent / "csrc"
HEADER = "cuda_runtime_api.h"
LIBRARY = "libcuda.so.1"
NVML = "libnvidia-ml.so.1"
SMI = """#!/bin/sh
# The queries of slime_like/util/gpus.py and of SGLang, for the phantom GPUs of this process; nothing else.
memory=$((${PHANTOM_GPU_MEMORY:-85899345920} / 1048576)) capability=${PHANTOM_GPU_CAPABILITY:-90} number=0
case "$1 $2" in
    "--query-gpu=name,memory.total,compute_cap --format=csv,noheader")
        line="Phantom GPU, $memory MiB, ${capability%?}.${capability#"${capability%?}"}" ;;
    "--query-gpu=memory.total --format=csv,noheader,nounits") line=$memory ;;
    *) echo "nvidia-smi of phantom GPUs: $* is not supported" >&2; exit 2 ;;
esac
while [ "$number" -lt "${PHANTOM_GPU_DEVICES:-1}" ]; do
    echo "$line"
    number=$((number + 1))
done
"""
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-w", f"-Wl,-soname,{LIBRARY}", "-pthread")


def include_folders() -> Iterator[Path]:
    """Yield the folders with CUDA's headers: those of NVIDIA's wheels, then of ``CUDA_HOME`` and /usr/local/cuda."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield from (header.parent for header in sorted(Path(location).glob(f"*/include/{HEADER}")))
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root and (folder := Path(root) / "include").joinpath(HEADER).is_file():
            yield folder


def runtime_version(folder: Path) -> str:
    """Return the CUDA version of the headers in ``folder``, such as 13000, or an empty string if they do not state it."""
    match = re.search(r"^#define CUDART_VERSION\s+(\d+)", folder.joinpath(HEADER).read_text(), re.MULTILINE)
    return match[1] if match else ""


def recipe() -> Recipe:
    """Return the build recipe of the library. Raises ``ConfigError`` if CUDA's headers are missing."""
    folder = next(include_folders(), None)
    if folder is None:
        raise ConfigError(
            f"a phantom GPU needs {HEADER}, and neither nvidia-cuda-runtime nor CUDA_HOME has it: install torch's CUDA "
            "build (bash scripts/setup.sh)"
        )
    names = (
        f"-DPHANTOM_HEADERS={runtime_version(folder)}",
        f"-DPHANTOM_SMI={crc32(SMI.encode())}",
    )  # parts of the object's name
    flags = (*FLAGS, *names, f"-I{SOURCE}", f"-I{folder}")
    return Recipe(SOURCE / "phantom.c", flags, description="phantom GPU's source")


def library() -> Path:
    """Return the path of the library, ``libcuda.so.1``, compiled if not cached.

    Its folder also contains NVML and ``nvidia-smi``. Raises ``ConfigError`` if the library cannot be compiled, for example
    because a C compiler or CUDA's headers are missing.
    """
    try:
        built = c_build.build(recipe()).path
    except BuildError as error:
        raise ConfigError(f"a phantom GPU could not be compiled: {error}") from error
    folder = built.with_suffix("")
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in (LIBRARY, NVML):
        _place(folder / name, lambda scratch: scratch.symlink_to(built))
    _place(folder / "nvidia-smi", _write_program)
    return folder / LIBRARY


def _write_program(file: Path) -> None:
    file.write_text(SMI)
    file.chmod(0o700)


def _place(file: Path, create: Callable[[Path], None]) -> None:
    """Create ``file`` atomically if it does not exist: several processes may do so at the same time."""
    if not file.exists():
        scratch = file.with_name(f"{file.name}.{os.getpid()}")
        scratch.unlink(missing_ok=True)
        create(scratch)
        scratch.replace(file)
