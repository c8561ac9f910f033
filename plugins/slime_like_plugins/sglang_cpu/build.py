"""Compile the C sources (``csrc``) of this or another plugin for this CPU. Standard library only.

python -m slime_like_plugins.sglang_cpu.build     # run during set-up; prints the shared objects, exit code 1 on failure
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime_like.printable import visible
from slime_like.util import c_build
from slime_like.util.c_build import COMPILERS, BuildError, Recipe, SharedObject, cache_folder

__all__ = ("COMPILERS", "BuildError", "SharedObject", "build", "cache_folder", "object_name", "run_compiler")

SOURCE = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")


def _recipe(source: Path | None) -> Recipe:
    """Return the recipe for ``kernels.c`` in ``source`` (default ``SOURCE``), with OpenMP if the compiler supports it."""
    return Recipe((source or SOURCE) / "kernels.c", FLAGS, extra=(("-fopenmp",), ()), description="kernels' source")


def object_name(compiler: str, source: Path | None = None) -> str:
    """Return the shared object's file name, derived from source, flags, compiler and CPU."""
    return c_build.object_name(compiler, _recipe(source))


def run_compiler(compiler: str, target: Path, source: Path | None = None) -> None:
    """Compile ``kernels.c`` in ``source`` (default ``SOURCE``) to ``target``. Raises ``BuildError`` on failure."""
    c_build.run_compiler(compiler, target, _recipe(source))


def build(source: Path | None = None) -> SharedObject:
    """Return the compiled kernels of the folder ``source`` (default ``SOURCE``) for this machine.

    Raises ``BuildError`` if they cannot be compiled or cached.
    """
    return c_build.build(_recipe(source))


def main() -> int:
    """Build the kernels of every plugin that has them, and print the paths of the shared objects.

    Return the exit code.
    """
    try:
        for source in sorted(SOURCE.parents[1].glob("*/csrc")):
            built = build(source)
            sys.stdout.write(visible(f"{source.parent.name}: {built.path} ({built.compiler})\n"))
    except BuildError as error:
        sys.stderr.write(visible(f"no C kernels on this CPU (torch's are used instead): {error}\n"))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
