"""Processes of tests on a GPU, forked from a process that has imported torch and has not used the GPU.

A process that has used a GPU cannot be forked, and each new one would import torch for seconds.
"""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import torch.multiprocessing

IMPORTS = ("torch", "torch.distributed")


def forking_context(*modules: str) -> ForkServerContext:
    """Return the context of processes that begin with ``modules`` imported. The modules must not use the GPU at import."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTS, *modules])
    return context
