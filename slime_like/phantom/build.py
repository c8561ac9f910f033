"""Compilation of ``csrc`` into the library that replaces CUDA's. No torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like.util import c_build
from slime_like.util.c_build import BuildError, Recipe

SOURCE = Path(__file__).parent / "csrc"
HEADER = "cuda_runtime_api.h"
LIBRARY = "libcuda.so.1"
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-fvisibility=hidden", "-w", f"-Wl,-soname,{LIBRARY}", "-pthread")


def include_folders() -> Iterator[Path]:
    """Yield the folders with CUDA's headers: those of NVIDIA's wheels, then of a toolkit."""
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield from (header.parent for header in sorted(Path(location).glob(f"*/include/{HEADER}")))
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root and (folder := Path(root) / "include").joinpath(HEADER).is_file():
            yield folder


def runtime_version(folder: Path) -> str:
    """Return the CUDA version of the headers in ``folder``, such as 13000."""
    match = re.search(r"^#define CUDART_VERSION\s+(\d+)", folder.joinpath(HEADER).read_text(), re.MULTILINE)
    return match[1] if match else ""


def recipe() -> Recipe:
    """Return the recipe of the library. Raises ``ConfigError`` without CUDA's headers."""
    folder = next(include_folders(), None)
    if folder is None:
        raise ConfigError(
            f"a phantom GPU needs {HEADER}, and neither nvidia-cuda-runtime nor CUDA_HOME has it: install torch's CUDA "
            "build (bash scripts/setup.sh)"
        )
    version = f"-DPHANTOM_HEADERS={runtime_version(folder)}"  # part of the object's name
    flags = (*FLAGS, version, f"-I{SOURCE}", f"-I{folder}")
    return Recipe(SOURCE / "phantom.c", flags, description="phantom GPU's source")


def library() -> Path:
    """Return the path of the library, ``libcuda.so.1`` in a separate folder, compiled if not cached.

    Raises ``ConfigError`` without a C compiler or CUDA's headers.
    """
    try:
        built = c_build.build(recipe()).path
    except BuildError as error:
        raise ConfigError(f"a phantom GPU could not be compiled: {error}") from error
    folder = built.with_suffix("")
    folder.mkdir(mode=0o700, exist_ok=True)
    link = folder / LIBRARY
    if not link.exists():
        scratch = folder / f"{LIBRARY}.{os.getpid()}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(built)
        scratch.replace(link)
    return link
