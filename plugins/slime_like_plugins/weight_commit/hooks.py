"""Hooks into SGLang: its schedulers fill parameters with NaN and check them, and its HTTP process rejects requests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.weight_sync import device_memory, shared
from slime_like_plugins.plugin_names import WEIGHT_COMMIT
from slime_like_plugins.sglang_hooks import HELD_PART, Hook
from slime_like_plugins.sglang_hooks import install as install_hooks
from slime_like_plugins.weight_commit import device_tensors, latent

MAX_NAMED = 3  # maximum number of parameters that an error names


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A parameter with elements that the update did not write, or wrote as NaN."""

    name: str
    elements: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.elements} of {self.total} elements)"


def poison(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Fill every floating-point parameter with NaN, in place, because captured graphs may read its storage."""
    with torch.no_grad():
        for _, parameter in parameters:
            if parameter.is_floating_point():
                parameter.fill_(float("nan"))


def unwritten(parameters: Iterable[tuple[str, Tensor]]) -> list[Unwritten]:
    """Return the parameters that contain NaN, in model order."""
    incomplete: list[Unwritten] = []
    for name, parameter in parameters:
        # The sum is NaN if any element is. Summing reads the parameter once; counting NaNs is slower.
        may_have_nan = parameter.is_floating_point() and bool(torch.isnan(parameter.sum()))
        if may_have_nan and (num_nan := int(torch.isnan(parameter).sum())):
            incomplete.append(Unwritten(name, num_nan, parameter.numel()))
    return incomplete


def incomplete_message(per_rank: list[list[Unwritten]]) -> str | None:
    """Return one error message for all tensor-parallel ranks; None if every element was written."""
    parts: list[str] = []
    for rank, incomplete in enumerate(per_rank):
        if incomplete:
            names = ", ".join(str(item) for item in incomplete[:MAX_NAMED])
            suffix = f" and {len(incomplete) - MAX_NAMED} more" if len(incomplete) > MAX_NAMED else ""
            parts.append(f"rank {rank}: {len(incomplete)} parameters: {names}{suffix}")
    if not parts:
        return None
    return f"weight update is not complete; parameters were missing, partly sent or sent as NaN: {'; '.join(parts)}"


REFUSAL = "_slime_like_refusal"
"""Attribute of the tokenizer manager: reason to refuse generation; absent or empty if generation is allowed."""
OPEN = "a weight update is open"
RELEASED = "the memory of the weights was released, and no weight update has been committed since"

type UpdateRequest = Callable[..., Awaitable[tuple[bool, str]]]
type GenerateStream = Callable[..., AsyncIterator[Any]]


def parameters(manager: Any, selector: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each parameter that an update writes, and of each tensor that SGLang computes from one.

    ``selector`` selects model runners (target and draft). Parameters that are tied within one model are yielded once. For a
    weight that is sharded over ranks, this rank's shard is yielded.
    """
    for role, runner in manager._select_runners(selector):
        for name, parameter in itertools.chain(runner.model.named_parameters(), latent.derived_weights(runner.model)):
            yield (name if role == "target" else f"{role}.{name}"), getattr(parameter, HELD_PART, parameter)


# ---- scheduler processes ---------------------------------------------------------------------------------------------
def begin_weight_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``SchedulerWeightUpdaterManager.begin_weight_update``: drop any open update; fill parameters with NaN."""
    manager._session = None
    output = original(manager, request)
    if output.success:
        for _, runner in manager._select_runners(request.selector):
            latent.drop_waiting(runner.model)
        poison(parameters(manager, request.selector))
    return output


def end_weight_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``SchedulerWeightUpdaterManager.end_weight_update``: fail if a parameter has unwritten elements.

    Collective over the tensor-parallel ranks.
    """
    if manager._session is None:
        return original(manager, request)
    incomplete = unwritten(parameters(manager, manager._session.selector))
    per_rank: list[Any] = [None] * torch.distributed.get_world_size(manager.tp_cpu_group)
    torch.distributed.all_gather_object(per_rank, incomplete, group=manager.tp_cpu_group)
    message = incomplete_message(per_rank)
    if message is None:
        return original(manager, request)
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    manager._session = None
    return EndWeightUpdateReqOutput(success=False, message=message)


def load_tensors(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``SchedulerWeightUpdaterManager.update_weights_from_tensor``: accept one payload for all ranks.

    A payload may describe tensors in the sender's memory, on the host or on this rank's GPU. A malformed payload fails the
    request and does not kill the engine. If ranks fail, every rank replies with the error of the first of them. Collective over
    the tensor-parallel ranks.
    """
    payloads = request.serialized_named_tensors
    if not payloads:
        return device_tensors.failure(
            "serialized_named_tensors is empty: send one payload for all tensor-parallel ranks, or one for each rank"
        )
    if manager._session is None:  # every rank then replies without a barrier, so none may wait for another
        return original(manager, request)
    group = manager.tp_cpu_group
    ranks = torch.distributed.get_world_size(group)
    if len(payloads) == 1:
        request.serialized_named_tensors = payloads * ranks
    if device_memory.is_message(payloads[0]):
        return device_tensors.load(original, manager, request)
    output, problem = None, ""
    try:
        if shared.is_message(payloads[0]):
            with shared.map_tensors(payloads[0]) as tensors:
                request.serialized_named_tensors = [tensors] * ranks
                output = original(manager, request)
        else:
            output = original(manager, request)
    except Exception as error:  # noqa: BLE001  fault boundary: a sender's mistake must not kill the engine
        problem = f"{type(error).__name__}: {error}"
        if output is None:
            torch.distributed.barrier(group=group)  # the other ranks wait at this barrier in ``original``
    return device_tensors.reply(group, output, problem)


def deserialize(original: Callable[..., Any], worker: Any, payloads: Any) -> Any:
    """Hook around ``BaseTpWorker.deserialize_own_rank``: return tensors unchanged if ``load_tensors`` has opened them already."""
    return payloads[0] if isinstance(payloads[0], list) else original(worker, payloads)


# ---- HTTP process ----------------------------------------------------------------------------------------------------
async def begin_request(original: UpdateRequest, manager: Any, *args: Any) -> tuple[bool, str]:
    """Hook around ``TokenizerControlMixin.begin_weight_update``: fail unless generation is paused.

    The engine would otherwise generate with parameters that are NaN.
    """
    if not manager.is_pause:
        return False, "pause generation before a weight update"
    success, message = await original(manager, *args)
    if success:
        setattr(manager, REFUSAL, OPEN)
    return success, message


async def end_request(original: UpdateRequest, manager: Any, *args: Any) -> tuple[bool, str]:
    """Hook around ``TokenizerControlMixin.end_weight_update``: after a failed commit, reject requests until a commit succeeds."""
    success, message = await original(manager, *args)
    if success or getattr(manager, REFUSAL, ""):  # ending an update that was never begun changes nothing
        setattr(manager, REFUSAL, "" if success else message)
    return success, message


async def failures_first(original: Callable[..., Awaitable[list[Any]]], communicator: Any, request: Any) -> list[Any]:
    """Hook around ``FanOutCommunicator.__call__``: return the replies of failed data-parallel ranks before all others.

    SGLang reads only the first reply to a flush. A rank that fails to flush keeps cached prefixes of the old weights.
    """
    return sorted(await original(communicator, request), key=lambda reply: getattr(reply, "success", True))


async def release_memory(original: Callable[..., Awaitable[None]], manager: Any, request: Any, *args: Any) -> None:
    """Hook around ``TokenizerControlMixin.release_memory_occupation``.

    Raises ``ValueError`` unless generation is paused, because SGLang's scheduler fails if it gets this request while it is busy.
    Once the memory of the weights has been released, the engine rejects requests until a weight update is committed.
    """
    if not manager.is_pause:
        raise ValueError("pause generation before memory is released")
    if not request.tags or "weights" in request.tags:
        setattr(manager, REFUSAL, RELEASED)
    await original(manager, request, *args)


async def generate(original: GenerateStream, manager: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Hook around ``TokenizerManager.generate_request``. Raises ``ValueError`` if the weights are incomplete or released.

    While an update is open the engine is paused, and requests wait as in any pause.
    """
    refusal = getattr(manager, REFUSAL, "")
    if refusal and refusal != OPEN:
        raise ValueError(f"generation is refused: {refusal}")
    async for item in original(manager, *args, **kwargs):
        yield item


async def resume(original: Callable[..., Awaitable[None]], manager: Any, *args: Any) -> None:
    """Hook around ``TokenizerManager.continue_generation``.

    Raises ``HTTPException`` (409) while an update is open, and if the weights are incomplete or released.
    """
    refusal = getattr(manager, REFUSAL, "")
    if refusal:
        from fastapi import HTTPException

        raise HTTPException(status_code=409, detail=f"generation stays paused: {refusal}")
    await original(manager, *args)


SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    latent.HOOK,
    Hook(f"{SCHEDULER}.begin_weight_update", "around", begin_weight_update),
    Hook(f"{SCHEDULER}.end_weight_update", "around", end_weight_update),
    Hook(f"{SCHEDULER}.update_weights_from_tensor", "around", load_tensors),
    Hook("sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank", "around", deserialize),
    Hook(f"{CONTROL}.begin_weight_update", "around", begin_request),
    Hook(f"{CONTROL}.end_weight_update", "around", end_request),
    Hook("sglang.srt.managers.communicator.FanOutCommunicator.__call__", "around", failures_first),
    Hook(f"{CONTROL}.release_memory_occupation", "around", release_memory),
    Hook(f"{TOKENIZER}.generate_request", "around", generate),
    Hook(f"{TOKENIZER}.continue_generation", "around", resume),
)


def install() -> None:
    """Apply the hooks in this process. Raises ``SystemExit`` if one does not take effect."""
    install_hooks(WEIGHT_COMMIT, HOOKS)
