"""Compilation of C sources with the machine's compiler, into a cache of this user.

Objects may be specific to the current CPU (``-march=native``), so their name is a hash of source, flags, compiler and CPU.
The folder is private, because processes execute its content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.util import caches
from slime_like.util.caches import is_private
from slime_like.util.deadline import scale

COMPILERS = ("cc", "gcc", "clang")
LAUNCHERS = ("ccache", "distcc", "sccache")  # words of ``$CC`` before the compiler
COMPILE_S = 300
X86_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")  # of /proc/cpuinfo
ARM_FIELDS = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")


class BuildError(Exception):
    """Failed build. The message names the cause and, if it is known, the fix."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Source to compile. ``main`` may include files of its folder."""

    main: Path
    flags: tuple[str, ...]
    extra: tuple[tuple[str, ...], ...] = ((),)  # alternatives: the first that the compiler accepts is used
    description: str = "source"  # in messages


@dataclass(frozen=True, slots=True)
class SharedObject:
    """Compiled shared object."""

    path: Path
    compiler: str


def find_compiler() -> str:
    """Return the path of the C compiler that ``$CC`` names or, if it names none, of the first of ``COMPILERS`` on PATH.

    Launchers and options in ``$CC`` are ignored. Raises ``BuildError`` if the compiler is not found.
    """
    words = [word for word in os.environ.get("CC", "").split() if Path(word).name not in LAUNCHERS]
    candidates = words[:1] or COMPILERS
    for name in candidates:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C compiler ({', '.join(candidates)}) on PATH: apt-get install gcc")


def cache_folder() -> Path:
    """Return the private folder of compiled objects, created if missing. Raises ``BuildError`` if it is unusable."""
    try:
        return caches.cache_folder("cpu_kernels")
    except (OSError, SlimeLikeError) as error:
        raise BuildError(f"cannot cache compiled kernels: {error}; set XDG_CACHE_HOME to a writable folder") from error


def cpu_identity() -> str:
    """Return the properties of an x86 or ARM CPU that ``-march=native`` depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    first = text.split("\n\n")[0]
    return "\n".join(re.findall(rf"^(?:{'|'.join((*X86_FIELDS, *ARM_FIELDS))})\s*:.*$", first, re.MULTILINE))


def object_name(compiler: str, recipe: Recipe) -> str:
    """Return the file name of the shared object: a hash of the source's folder, the flags, the compiler and the CPU."""
    digest = hashlib.sha256()
    for file in sorted(recipe.main.parent.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    state = os.stat(compiler)
    extra = [flag for flags in recipe.extra for flag in flags]
    for part in (
        recipe.main.name,
        *recipe.flags,
        *extra,
        os.path.realpath(compiler),
        state.st_size,
        state.st_mtime_ns,
        cpu_identity(),
    ):
        digest.update(f"{part}\0".encode())
    return f"{digest.hexdigest()[:24]}.so"


def run_compiler(compiler: str, target: Path, recipe: Recipe) -> None:
    """Compile ``recipe`` to ``target``. Raises ``BuildError`` if the compiler fails, times out or cannot be executed."""
    message = ""
    for extra in recipe.extra:
        command = [compiler, *recipe.flags, *extra, str(recipe.main), "-o", str(target), "-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S * scale(), check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler} could not be run: {error}") from error
        if result.returncode == 0:
            return
        message = message or result.stderr.strip()[-500:] or f"exit code {result.returncode} without a message"
    raise BuildError(f"{compiler} could not compile the {recipe.description}: {message}")


def build(recipe: Recipe) -> SharedObject:
    """Return the shared object of ``recipe`` for this machine, compiled if not cached; the file is created atomically.

    Raises ``BuildError`` if it cannot be compiled or cached.
    """
    compiler, folder = find_compiler(), cache_folder()
    try:
        path = folder / object_name(compiler, recipe)
        if path.is_file() and is_private(path):
            return SharedObject(path, compiler)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            target = Path(scratch) / "object.so"
            run_compiler(compiler, target, recipe)
            target.chmod(0o700)
            target.replace(path)
    except OSError as error:
        raise BuildError(f"the {recipe.description} cannot be compiled into {folder}: {error}") from error
    return SharedObject(path, compiler)
