"""The C kernels of this machine, for tests that need no engine."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from slime_like_plugins.sglang_cpu import build
from slime_like_plugins.sglang_cpu.kernels import CKernels

HAS_COMPILER = any(shutil.which(name) for name in build.COMPILERS)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")


@cache
def C() -> CKernels:
    """Compiled once per machine."""
    return CKernels(build.build().path)


def has_products() -> bool:
    """Return whether this CPU supports the kernels and a compiler works."""
    try:
        return HAS_COMPILER and C().has_products
    except (build.BuildError, OSError):  # test_cpu_build.py says so
        return False
