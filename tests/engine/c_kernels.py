"""The C kernels, compiled for this machine, for tests without an engine."""

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
    """Return the kernels, compiled at the first call."""
    return CKernels(build.build().path)


def has_products() -> bool:
    """Return whether a compiler works and this CPU supports the matrix products of the kernels."""
    try:
        return HAS_COMPILER and C().has_products
    except (build.BuildError, OSError):  # test_cpu_build.py tests this
        return False
