"""Hooks that shard a model while SGLang builds it, and reject arguments and calls that sharded weights do not support."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from slime_like.config.schema.flow_mla import (
    SKIP_VARIABLE,
    VARIABLE,
    FlowOptions,
    field_obstacle,
    from_json,
    missing_weights,
    required_values,
    skips_forwards,
)
from slime_like_plugins.flow_mla import absorbed
from slime_like_plugins.flow_mla.gather import Gather, GroupGather, create_groups
from slime_like_plugins.flow_mla.pull import GroupExchange, PullGather, part_memory
from slime_like_plugins.flow_mla.sharding import UNREADABLE, ShardedWeights
from slime_like_plugins.plugin_names import FLOW_MLA
from slime_like_plugins.sglang_hooks import Hook, fix_of, stop_on, through_loaders
from slime_like_plugins.sglang_hooks import install as install_hooks

logger = logging.getLogger(__name__)
_models: list[ShardedWeights] = []
"""The sharded model of this process, once it has been built."""


def options() -> FlowOptions:
    """Return the settings of this process."""
    return from_json(os.environ.get(VARIABLE, "{}"))


def check_arguments(original: Callable[..., None], server_args: Any) -> None:
    """Hook around ``ServerArgs.resolve_once``: stop the engine (``SystemExit``) if FlowMLA cannot serve its arguments or model.

    The number of data-parallel attention groups is checked first, because SGLang only asserts, without a message, that it
    divides ``tp_size``.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    groups = max(
        int(server_args.attn_dp_size or 1), int(server_args.dp_size or 1) * bool(server_args.enable_dp_attention)
    )
    if server_args.tp_size % groups:
        raise SystemExit(
            f"slime_like plugin {FLOW_MLA!r}: {groups} groups of data-parallel attention do not divide tp_size={server_args.tp_size}: set "
            "--attention-data-parallel-size to a divisor of --tp-size"
        )
    original(server_args)
    view = resolved_view(server_args)
    if problem := obstacle(view) or model_obstacle(view.quantization, model_config_of(server_args)):
        raise SystemExit(f"slime_like plugin {FLOW_MLA!r}: {problem}")


def obstacle(view: Any) -> str | None:
    """Return the reason why the resolved arguments ``view`` or the environment rule out FlowMLA; None if neither does."""
    if int(view.attn_dp_size or 1) == 1:
        return (
            "attn_dp_size=1: only ranks of data-parallel attention hold the same weights; set rollout.dp_attention "
            "(--attention-data-parallel-size) to 2 or more"
        )
    if skips_forwards(os.environ):
        return (
            f"the environment variable {SKIP_VARIABLE}={os.environ[SKIP_VARIABLE]}: ranks without tokens would skip forwards, and a "
            f"gather needs all ranks; unset {SKIP_VARIABLE}"
        )
    transport = options().transport
    for field, (required, _) in required_values(transport).items():
        value = getattr(view, field)
        if (field, value) == ("quantization", "fp8"):
            continue  # the checkpoint's type; sharding checks each of its weights
        if reason := field_obstacle(field, value, transport):
            fix = fix_of(field, required)
            return f"SGLang resolved {field}={value!r}, which is not allowed with FlowMLA: {reason}; {fix}, or serve without FlowMLA"
    return None


def model_obstacle(quantization: str | None, config: Any) -> str | None:
    """Return the reason why a model's configuration or ``quantization`` rules out FlowMLA; None if neither does.

    ``config`` is SGLang's ``ModelConfig``.
    """
    if missing := missing_weights(options().weights, latent=config.attention_arch.name == "MLA"):
        return f"rollout.flow_mla.weights (--flow-mla-weights) {missing}"
    if quantization == "fp8" and not config.hf_quant_config:
        return (
            "quantization='fp8' for a checkpoint without FP8 weights, which SGLang would quantise after a load; remove "
            "rollout.sglang.quantization (--quantization), or serve without FlowMLA"
        )
    return None


def shard_layers(
    original: Callable[..., Any], num_hidden_layers: int, layer_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Hook around ``make_layers``: shard each decoder layer once it is built.

    Collective. Raises ``SystemExit`` if the model has two stacks of decoder layers or lacks a weight that
    ``rollout.flow_mla.weights`` names, if a weight cannot be sharded, or if the ranks cannot share their parts.
    """
    weights = create_weights()

    def build(*arguments: Any, **options: Any) -> Any:
        layer = layer_fn(*arguments, **options)
        weights.add(layer)
        return layer

    result = original(num_hidden_layers, build, *args, **kwargs)
    if problems := weights.key_problems():
        raise SystemExit(f"slime_like plugin {FLOW_MLA!r}: {'; '.join(problems)}")
    weights.bind()
    return result


def allocate_slots(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook after ``DefaultModelLoader.load_model``: allocate the slots for forwards, and check this rank's memory.

    This runs within the memory saver's region for weights, so the slots are released together with the weights.
    Raises ``SystemExit`` if a check fails.
    """
    for weights in _models:
        stop_on(FLOW_MLA, weights.slot_problems())  # before the views are set again
        counts = weights.finish_loading()
        problems = weights.aliases()
        if (num_bytes := weights.held_bytes()) != counts.private + counts.slots:
            problems.append(
                f"a rank holds {num_bytes} bytes of sharded weights instead of {counts.private + counts.slots}"
            )
        if weights.peak_bytes > counts.loading:
            problems.append(
                f"a rank held {weights.peak_bytes} bytes of sharded weights while loading instead of {counts.loading}"
            )
        stop_on(FLOW_MLA, problems)
        logger.info(
            "slime_like FlowMLA shards %s of %d layers over %d ranks (%s): %d bytes of each rank instead of %d (%d private, %d in %d "
            "slots), at most %d while loading",
            *(", ".join(options().weights), len(weights.layers), weights.num_ranks, options().transport, num_bytes),
            *(counts.full, counts.private, counts.slots, len(weights.pipeline.slots), weights.peak_bytes),
        )
    return model


def create_weights() -> ShardedWeights:
    """Create the process groups, and return the sharded weights of this process's model, still without layers.

    Collective. Raises ``SystemExit`` if the process already has a model.
    """
    from sglang.srt.runtime_context import get_parallel

    if _models:
        raise SystemExit(
            f"slime_like plugin {FLOW_MLA!r}: the model has two stacks of decoder layers, which is not supported"
        )
    parallel, settings = get_parallel(), options()
    ranks = parallel.tp_group.ranks
    members = [ranks[rank :: parallel.attn_tp_size] for rank in range(parallel.attn_tp_size)]
    if settings.transport == "p2p":
        (group,) = create_groups(members, 1, "gloo")
        memory = part_memory(parallel.tp_group.device, settings.prefetch_distance)
        gather: Gather = PullGather(parallel.attn_dp_rank, parallel.attn_dp_size, GroupExchange(group), memory)
    else:
        backend = dist.get_backend(parallel.tp_group.device_group)
        gather = GroupGather(create_groups(members, settings.prefetch_distance, backend, settings.max_ctas))
    weights = ShardedWeights(settings, parallel.attn_dp_rank, parallel.attn_dp_size, gather)
    _models.append(weights)
    return weights


def absorb(original: Callable[..., Any], model: Any, is_nextn: bool = False, weight_names: Any = None) -> None:
    """Hook around ``post_load_weights`` of models with latent attention: compute sharded absorbed weights layer by layer."""
    if "kv_b_proj" not in options().weights:
        original(model, is_nextn, weight_names)
        return
    (weights,) = _models
    source_names = (absorbed.source_name(layer) for layer in range(model.model.start_layer, model.model.end_layer))
    names = source_names if weight_names is None else weight_names
    absorbed.compute_by_layer(lambda names: original(model, is_nextn, names), weights.update, model.model, names)


def postprocess_float8(original: Callable[..., Any], method: Any, module: Any) -> None:
    """Hook around ``Fp8LinearMethod.process_weights_after_loading``: run it on the gathered layer of a sharded weight.

    Other modules are processed as usual. SGLang's method needs whole matrices. Raises ``SystemExit`` if SGLang has replaced the
    memory of a sharded weight.
    """
    for weights in _models:
        if (layer := weights.layer_of(module)) is not None:
            weights.update(layer, lambda: original(method, module))
            if problems := weights.slot_problems():
                raise SystemExit(
                    f"slime_like plugin {FLOW_MLA!r}: {problems[0]} after SGLang's post-processing: its FP8 kernels need weights or scales of "
                    "a different type here, as DeepGEMM does on Blackwell; serve without FlowMLA, or with other kernels (--fp8-gemm-backend)"
                )
            return
    original(method, module)


def check_loaded(result: Any, runner: Any) -> Any:
    """Hook after ``ModelRunner.load_model``: check that the model has sharded weights, all loaded and in their slots.

    Raises ``SystemExit``, which stops the engine, if not.
    """
    if not _models:
        raise SystemExit(
            f"slime_like plugin {FLOW_MLA!r}: no weight of {type(runner.model).__name__} is sharded, because this model of SGLang builds its "
            "layers without make_layers; set rollout.flow_mla.enabled=false (remove --enable-flow-mla)"
        )
    for weights in _models:
        stop_on(
            FLOW_MLA,
            weights.slot_problems()
            if weights.is_loaded
            else ["the weights were loaded without DefaultModelLoader.load_model"],
        )
    return result


def run_forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``ModelRunner.forward``: fill slots that are empty, as after a weight push.

    A CUDA graph of the model was captured with filled slots, so it does not fill them itself.
    """
    for weights in _models:
        weights.pipeline.begin()
    return original(runner, *args, **kwargs)


def release_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Hook around ``release_memory_occupation``: finish the gathers and empty the slots, whose memory may be lost."""
    for weights in _models:
        weights.pipeline.drain()
    return original(manager, request)


def open_update(original: Callable[..., Any], updater: Any) -> Any:
    """Hook around ``WeightUpdater.begin_weight_update``: finish the gathers of all ranks before any rank writes its parts."""
    for weights in _models:
        weights.pipeline.drain()
    return original(updater)


load_tensors = through_loaders(
    "bypasses the model's loaders and would write to a slot of FlowMLA instead of this rank's part"
)


def refuse_checks(runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ``NotImplementedError`` for ``ModelRunner.check_weights``, whose checksums would be those of the slots."""
    raise NotImplementedError(UNREADABLE)


UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
HOOKS = (
    Hook("sglang.srt.server_args.ServerArgs.resolve_once", "around", check_arguments),
    Hook("sglang.srt.utils.common.make_layers", "around", shard_layers),
    Hook(
        "sglang.srt.models.deepseek_common.deepseek_weight_loader.DeepseekV2WeightLoaderMixin.post_load_weights",
        "around",
        absorb,
    ),
    Hook(
        "sglang.srt.layers.quantization.fp8.Fp8LinearMethod.process_weights_after_loading", "around", postprocess_float8
    ),
    Hook("sglang.srt.model_loader.loader.DefaultModelLoader.load_model", "after", allocate_slots),
    Hook(f"{RUNNER}.load_model", "after", check_loaded),
    Hook(f"{RUNNER}.forward", "around", run_forward),
    Hook(f"{RUNNER}.check_weights", "replace", refuse_checks),
    Hook(f"{UPDATER}.begin_weight_update", "around", open_update),
    Hook(f"{UPDATER}.update_weights_from_tensor", "around", load_tensors),
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation",
        "around",
        release_memory,
    ),
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks(FLOW_MLA, HOOKS)
