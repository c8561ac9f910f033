"""Loading of tensor buckets that lie in the device memory of the trainer's ranks.

A rank of the engine maps its bucket into its own process, and unmaps it before the engine replies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.device_memory import CudaHandles, DeviceHandles, OpenedBucket


def load(original: Callable[..., Any], manager: Any, request: Any, handles: DeviceHandles | None = None) -> Any:
    """Load this rank's bucket with ``original`` (``SchedulerWeightUpdaterManager.update_weights_from_tensor``).

    SGLang replies when the ranks have started their copies. The sender overwrites the memory after the reply, so here
    the ranks reply only when all their copies have finished. If ranks fail, every rank replies with the error of the
    first of them. Collective over the tensor-parallel ranks.
    """
    group = manager.tp_cpu_group
    bucket, problem = None, ""
    try:
        payload = request.serialized_named_tensors[dist.get_rank(group)]
        bucket = OpenedBucket(payload, CudaHandles() if handles is None else handles)
    except (WeightSyncError, IndexError) as error:
        problem = str(error)
    if (refusal := exchange_problem(group, problem)) or bucket is None:
        return failure(refusal)
    request.serialized_named_tensors = [bucket.tensors] * dist.get_world_size(group)
    output = None
    try:
        output = original(manager, request)
    except Exception as error:  # noqa: BLE001  fault boundary: a sender's mistake must not kill the engine
        problem = f"{type(error).__name__}: {error}"
        dist.barrier(group=group)  # the other ranks wait at this barrier in ``original``
    request.serialized_named_tensors = []
    try:
        bucket.close()
    except WeightSyncError as error:
        problem = problem or str(error)
    return reply(group, output, problem)


def reply(group: Any, output: Any, problem: str) -> Any:
    """Return this rank's reply: SGLang's ``output``, or a failure if any rank has a problem or a failed output. Collective.

    ``output`` is None if SGLang raised an error, which is ``problem``.
    """
    if output is not None and not output.success:
        problem = problem or output.message or "SGLang did not load them"
    refusal = exchange_problem(group, problem)
    return failure(refusal) if refusal or output is None else output


def exchange_problem(group: Any, problem: str) -> str:
    """Wait for all ranks. Return the problem of the first rank that has one, with the number of the rank, or "". Collective."""
    problems: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    return next((f"rank {rank} of {len(problems)}: {problem}" for rank, problem in enumerate(problems) if problem), "")


def failure(message: str) -> Any:
    """Return SGLang's reply for tensors that were not loaded."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    return UpdateWeightsFromTensorReqOutput(success=False, message=f"tensors could not be loaded: {message}")
