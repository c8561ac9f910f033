"""CUDA toolkit assembled from NVIDIA's wheels, for engines on a machine without an installed toolkit.

SGLang and tvm_ffi look for nvcc in CUDA_HOME, CUDA_PATH, on PATH and in /usr/local/cuda, and link with
``lib64/libcudart.so``. The wheels have no such folder, and their libraries have a version in their name. FlashInfer also
links with ``lib64/stubs/libcuda.so``, which a driver provides only as ``libcuda.so.1``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from slime_like.util.caches import cache_folder

SYSTEM = Path("/usr/local/cuda")
RUNTIME = "libcudart.so"
LIBRARY_PATH = "LD_LIBRARY_PATH"
DRIVER = "libcuda.so.1"
DRIVER_FOLDERS = tuple(
    f"/usr/{name}" for name in ("lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "lib64", "local/nvidia/lib64")
)


def toolkit_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable CUDA_HOME for a process with ``environment``.

    It names a cached folder of links to the files of NVIDIA's wheels, which is created if missing. It is the same
    folder in every run, since SGLang recompiles if a path in the compiler's command changes. The returned dict is empty
    if a toolkit is installed, or if the wheels are not installed. Raises ``SlimeLikeError`` and ``OSError`` as
    ``cache_folder`` does.
    """
    installed = any(environment.get(name) for name in ("CUDA_HOME", "CUDA_PATH")) or SYSTEM.exists()
    if installed or shutil.which("nvcc", path=environment.get("PATH")) or (wheel := _wheel()) is None:
        return {}
    home = cache_folder(f"cuda_{hashlib.sha256(os.fsencode(wheel)).hexdigest()[:16]}")
    libraries = home / "lib64"
    libraries.mkdir(exist_ok=True)
    for name in ("bin", "include", "nvvm"):
        _link(home / name, wheel / name)
    for library in (wheel / "lib").iterdir():
        _link(libraries / library.name, library)
    (libraries / "stubs").mkdir(exist_ok=True)
    folders = [*filter(None, environment.get(LIBRARY_PATH, "").split(":")), *DRIVER_FOLDERS]
    if driver := next((path for folder in folders if (path := Path(folder) / DRIVER).exists()), None):
        _link(libraries / "stubs" / "libcuda.so", driver)
    _link(libraries / RUNTIME, next((wheel / "lib").glob(f"{RUNTIME}.*"), wheel / "lib" / RUNTIME))
    return {"CUDA_HOME": str(home)}


def library_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable LD_LIBRARY_PATH, extended by the folder of the CUDA runtime in NVIDIA's wheels.

    The dict is empty if the wheels are not installed. A library that is preloaded into Python needs the variable; torch finds
    the runtime without it.
    """
    folders = [str(file.parent) for location in _locations() for file in sorted(location.glob(f"*/lib/{RUNTIME}.*"))]
    if not folders:
        return {}
    return {LIBRARY_PATH: ":".join(filter(None, (environment.get(LIBRARY_PATH), folders[0])))}


def _locations() -> list[Path]:
    """Return the folders of NVIDIA's wheels."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(location) for location in (spec.submodule_search_locations or ())] if spec else []


def _link(path: Path, target: Path) -> None:
    """Create a link if it is missing, or if its target is missing on this node; another engine may do so at the same time.

    Nodes that share the folder may have their driver in different places.
    """
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.symlink_to(target)
        temporary.replace(path)
    except OSError:  # a dangling link in a folder that this process cannot write to
        if not path.is_symlink():
            raise


def _wheel() -> Path | None:
    """Return the folder of NVIDIA's wheels that contains nvcc and the runtime library; None if there is none."""
    for location in _locations():
        for compiler in sorted(location.glob("*/bin/nvcc")):
            home = compiler.parent.parent
            if os.access(compiler, os.X_OK) and any((home / "lib").glob(f"{RUNTIME}*")):
                return home
    return None
