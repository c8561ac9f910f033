"""Hooks that move part of the experts to a worker, forward weight updates to it, and reject unsupported arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slime_like.config.schema.remote_experts import UNSUPPORTED_FIELDS as FIELDS
from slime_like.config.schema.remote_experts import VARIABLE, RemoteOptions, field_obstacle, from_json
from slime_like.errors import ConfigError
from slime_like.util.counted import counted
from slime_like_plugins.plugin_names import REMOTE_EXPERTS
from slime_like_plugins.remote_experts.client import FAILURES
from slime_like_plugins.remote_experts.experts import FIX, RemoteExpertsLost
from slime_like_plugins.remote_experts.flags import KEYS, in_settings_of_user
from slime_like_plugins.remote_experts.model import ROWS, UNREADABLE, RemoteModel
from slime_like_plugins.sglang_hooks import Hook, fix_of, setting_of, through_loaders
from slime_like_plugins.sglang_hooks import install as install_hooks

logger = logging.getLogger(__name__)
MAX_NAMED = 3
RUNNER_BACKENDS = ("auto", "triton")
_models: list[RemoteModel] = []
"""The model of this process with remote experts, once its first MoE layer has been built."""


def options() -> RemoteOptions:
    """Return the settings of this process."""
    return from_json(os.environ.get(VARIABLE, "{}"))


# ---- start -----------------------------------------------------------------------------------------------------------
def check_resolved(result: None, server_args: Any) -> None:
    """Hook after ``ServerArgs.resolve_once``: check that remote experts support the engine's arguments.

    Raises ``SystemExit``, which stops the engine, if they do not.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    if problem := obstacle(resolved_view(server_args), options()):
        raise _stop(problem)


def _stop(problem: object) -> SystemExit:
    """Return the error that stops the engine; it names flags instead of keys if the server was started with such flags."""
    return SystemExit(f"slime_like plugin {REMOTE_EXPERTS!r}: {in_settings_of_user(str(problem))}")


def obstacle(view: Any, settings: RemoteOptions) -> str | None:
    """Return the reason why an engine with the resolved arguments ``view`` cannot have remote experts; None if it can."""
    for field in FIELDS:
        value = getattr(view, field)
        if reason := field_obstacle(field, value):
            required, _ = FIELDS[field]
            return (
                f"SGLang resolved {field}={value!r}, which is not allowed with remote experts: {reason}; {fix_of(field, required)}, or "
                "serve without remote experts"
            )
    if view.moe_runner_backend not in RUNNER_BACKENDS:
        return (
            f"moe_runner_backend={view.moe_runner_backend!r} stores weights in a different layout: set "
            f"{setting_of('moe_runner_backend')} to {' or '.join(RUNNER_BACKENDS)}"
        )
    graphs = [phase for phase in ("prefill", "decode") if getattr(view, f"cuda_graph_backend_{phase}") != "disabled"]
    if str(view.device).startswith("cuda") and graphs and not view.disable_cuda_graph:
        return f"a request to a worker cannot be captured in a CUDA graph: set {setting_of(f'cuda_graph_backend_{graphs[0]}')} to disabled"
    if settings.workers and len(settings.workers) != view.tp_size:
        addresses = counted(len(settings.workers), "address", "addresses")
        return f"{KEYS}workers has {addresses} for tp_size={view.tp_size}: give one address for each rank"
    return None


def create_weights(original: Callable[..., None], method: Any, layer: Any, num_experts: int, **arguments: Any) -> None:
    """Hook around ``UnquantizedFusedMoEMethod.create_weights``: allocate the local experts of a layer.

    A layer of a draft model, or with ``is_shared_fused_moe``, keeps all of its experts in the engine. Raises ``SystemExit`` if
    remote experts do not support the layer, or the settings do not fit it.
    """
    if layer.is_draft or layer.is_shared_fused_moe:
        original(method, layer=layer, num_experts=num_experts, **arguments)
        return

    def create(num_local: int) -> None:
        original(method, layer=layer, num_experts=num_local, **arguments)

    sizes = arguments["hidden_size"], arguments["intermediate_size_per_partition"], arguments["params_dtype"]
    try:
        _model().add(layer, create, sizes)
    except (ConfigError, ValueError) as error:
        raise _stop(error) from error


def _model() -> RemoteModel:
    """Return the model of this process, created at the first call."""
    if not _models:
        from sglang.srt.runtime_context import get_parallel, process_model_config

        top_k = getattr(process_model_config().hf_text_config, "num_experts_per_tok", None)
        _models.append(RemoteModel(options(), int(get_parallel().tp_rank), top_k))
    return _models[0]


def commit_loaded(result: Any, runner: Any) -> Any:
    """Hook after ``ModelRunner.load_model``: commit the loaded weights as the worker's first version.

    Raises ``SystemExit``, which stops the engine, if the model has no remote experts, the settings cannot be used, the worker
    failed, or an expert was not loaded.
    """
    if not _models:
        raise _stop(
            "the model has no experts, or quantised ones, which a worker cannot compute; serve a checkpoint that is not quantised, or "
            "serve without remote experts"
        )
    (model,) = _models
    try:
        model.open()
    except (*FAILURES, ConfigError) as error:
        raise _stop(error) from error
    incomplete, failure = model.experts.unwritten()
    if incomplete and not failure:
        names = ", ".join(name for name, _, _ in incomplete[:MAX_NAMED])
        failure = (
            f"the checkpoint in {runner.model_config.model_path} lacks weights: {names}; use a complete checkpoint"
        )
    if failure := failure or model.experts.commit():
        raise _stop(failure)
    return result


# ---- forward ---------------------------------------------------------------------------------------------------------
def apply(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Hook around ``UnquantizedFusedMoEMethod.apply``: return the sums over local and remote experts."""
    if not hasattr(layer, ROWS):
        return original(method, layer=layer, dispatch_output=dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    topk = dispatch_output.topk_output

    def compute(local_ids: torch.Tensor) -> torch.Tensor:
        output = dispatch_output._replace(topk_output=topk._replace(topk_ids=local_ids))
        return original(method, layer=layer, dispatch_output=output).hidden_states

    (model,) = _models
    with torch.no_grad():
        return StandardCombineInput(hidden_states=model.forward(layer, dispatch_output.hidden_states, topk, compute))


# ---- weight updates --------------------------------------------------------------------------------------------------
def begin_weight_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``begin_weight_update``: after it, make the worker invalidate the remote experts' weights.

    Nothing is invalidated if the update is only for the draft model of speculative decoding, or was not opened.
    """
    output = original(manager, request)
    if output.success and _selects_target(manager, request.selector):
        _models[0].experts.begin()
    return output


def end_weight_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``end_weight_update``: check the workers of all ranks, call ``original``, then commit.

    A failure ends the update. Only ``original`` is called if no update is open, or if the update is only for the draft model.

    Collective: every rank takes part in every exchange, whatever happened to its worker, so that no other rank waits
    for it forever. Raises ``RemoteExpertsLost`` as ``check`` does.
    """
    session = manager._session
    if session is None or not _selects_target(manager, session.selector):
        return original(manager, request)
    if message := check(manager):
        manager._session = None
        return _failed(message)
    output = original(manager, request)
    message = commit(manager) if output.success else ""
    return _failed(message) if message else output


def update_at_once(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around SGLang's updates of all weights in one call, from disk or by IPC: check and commit the workers' new weights.

    Return the failure if the check or the commit fails. Collective. If the update fails on one rank, every rank reports the
    failure and skips the check: a rank that checked alone would wait for the others forever. Raises ``RemoteExpertsLost`` as
    ``check`` does.
    """
    output = original(manager, request)
    failure = "" if output.success else output.message or "SGLang did not update the weights"
    message = _joined(manager, failure) or check(manager) or commit(manager)
    return type(output)(success=False, message=message) if message else output


def check(manager: Any) -> str:
    """Return an error message if the weights of any rank's worker cannot be committed, else "". Collective.

    Raises ``RemoteExpertsLost`` on every rank if a worker failed and the policy is ``required``.
    """
    incomplete, failure = _models[0].experts.unwritten()
    names = ", ".join(f"{name} ({missing} of {total} elements)" for name, missing, total in incomplete[:MAX_NAMED])
    text = f"{counted(len(incomplete), 'matrix', 'matrices')}: {names}" if incomplete else ""
    problem = _joined(manager, text, failure)
    if problem:
        return f"weight update is not complete; remote experts were missing, partly sent or sent as NaN: {problem}"
    return ""


def commit(manager: Any) -> str:
    """Commit the weights of every rank's worker. Return the failures of all ranks, or "" on success. Collective.

    If the option ``record_load`` names a file, rank 0 writes the token counts to it. Raises ``RemoteExpertsLost`` as ``check``
    does.
    """
    failure = _models[0].experts.commit()
    _models[0].record_load()
    return _joined(manager, failure, failure)


def _joined(manager: Any, text: str, failure: str = "") -> str:
    """Return one line with each rank's ``text`` or, where that is empty, its worker's ``failure``; "" if all are empty.

    Collective. Raises ``RemoteExpertsLost`` on every rank if a worker failed and the policy is ``required``.
    """
    per_rank: list[Any] = [None] * dist.get_world_size(manager.tp_cpu_group)
    dist.all_gather_object(per_rank, (text, failure), group=manager.tp_cpu_group)
    if options().policy == "required" and (failures := [failed for _, failed in per_rank if failed]):
        fix = in_settings_of_user(FIX)
        raise RemoteExpertsLost(f"remote experts are lost in a weight update: {'; '.join(failures)}; {fix}")
    parts = (f"rank {rank}: {text or failed}" for rank, (text, failed) in enumerate(per_rank) if text or failed)
    return "; ".join(parts)


def _selects_target(manager: Any, selector: str) -> bool:
    return any(role == "target" for role, _ in manager._select_runners(selector))


def _failed(message: str) -> Any:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqOutput

    return EndWeightUpdateReqOutput(success=False, message=message)


load_tensors = through_loaders(
    "writes weights without the model's loaders, so that a worker of remote experts would miss them"
)


def refuse_checks(runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ``NotImplementedError`` for ``ModelRunner.check_weights``, whose checksums would lack the remote experts."""
    raise NotImplementedError(UNREADABLE)


METHOD = "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.resolve_once", "after", check_resolved),
    Hook(f"{METHOD}.create_weights", "around", create_weights),
    Hook(f"{METHOD}.apply", "around", apply),
    Hook(f"{RUNNER}.load_model", "after", commit_loaded),
    Hook(f"{RUNNER}.check_weights", "replace", refuse_checks),
    Hook(f"{MANAGER}.begin_weight_update", "around", begin_weight_update),
    Hook(f"{MANAGER}.end_weight_update", "around", end_weight_update),
    Hook(f"{MANAGER}.update_weights_from_disk", "around", update_at_once),
    Hook(f"{MANAGER}.update_weights_from_ipc", "around", update_at_once),
    Hook(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor",
        "around",
        load_tensors,
    ),
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks(REMOTE_EXPERTS, HOOKS)
