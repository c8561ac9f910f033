"""Processes of tests on a GPU, forked from a process that has imported torch and has not used the GPU.

A process that has used a GPU cannot be forked, and each new one would import torch for seconds.
"""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import torch.multiprocessing

# None of them uses the GPU at import. If one cannot be imported in the server, each process imports it.
IMPORTS = (
    "pytest",
    "torch.distributed",
    "slime_like.weight_sync.ipc",
    "slime_like_plugins.flow_mla.sharding",
    "tests.engine.flow_models",
)


def forking_context() -> ForkServerContext:
    """Return the context of processes that begin with ``IMPORTS``, unless another fork server has been started before."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTS])
    return context
