"""Builders of megatron's gradient buckets, optimizer (AdamW) and learning rate schedule."""

from __future__ import annotations

import gc
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_like.config.rules.schedule import resolve_schedule
from slime_like.config.schema.resolved import RankSpec
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.model.transformer_config import dtype_of
from slime_like.train.megatron.platform import host

_MEGATRON_STYLE = {"wsd": "WSD"}


def wrap(spec: RankSpec, model: ModelSegments) -> ModelSegments:
    """Wrap each segment in megatron's DDP: float32 gradients, reduced over dp and cp (scattered for the distributed optimizer).

    The model's TransformerConfig gets the functions that megatron's schedules call to reduce gradients.
    """
    layout = spec.layout
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        check_for_nan_in_grad=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
    )
    transformer_config = model.last.config
    transformer_config.finalize_model_grads_func = finalize_model_grads
    mark_experts(model)
    # Later virtual stages have one bucket, as in megatron's trainer: the reduction overlaps with computation of other segments.
    wrapped_segments = [
        DistributedDataParallel(transformer_config, config, policy, disable_bucketing=i > 0)
        for i, policy in enumerate(model.policies)
    ]
    if layout.overlap_grad_reduce:  # reduce only in the last micro-batch
        functions: Any = [segment.no_sync for segment in wrapped_segments]
        transformer_config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return ModelSegments(wrapped_segments)


def mark_experts(model: ModelSegments) -> None:
    """Mark the parameters of routed experts: in every layout, gradients are then reduced over the copies of an expert.

    megatron marks them only for ep > 1, and so could not load optimizer state saved with ep = 1 into ep > 1 or vice versa.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            setattr(parameter, "allreduce", False)  # noqa: B010 (read by DDP and optimizer)


def gather_parameters(wrapped: ModelSegments) -> None:
    """Gather this rank's updated weights from the optimizer's shards if megatron defers that to the next forward pass.

    megatron does so with overlap_param_gather. Required before any other read of the weights: export, checkpoint, swapping in
    other weights. Collective.
    """
    segments: list[Any] = list(wrapped)
    for segment in segments:
        if segment.ddp_config.overlap_param_gather:
            with torch.no_grad():
                segment.start_param_sync(force_sync=True)


def make_optimizer(spec: RankSpec, wrapped: ModelSegments) -> Any:
    """Build megatron's optimizer over this rank's parameters or, if it is distributed, over this rank's shard of them."""
    optim, dtype = spec.optim, dtype_of(spec)
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=min(optim.min_lr, optim.lr),
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad or float("inf"),  # inf: the norm is measured without clipping
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=spec.layout.distributed_optimizer,
        overlap_param_gather=spec.layout.overlap_param_gather,
        **_offload(spec),
    )
    segments: list[Any] = list(wrapped)
    with host.building_optimizer():
        optimizer = get_megatron_optimizer(config, segments, use_gloo_process_groups=False)
    if config.optimizer_cpu_offload:
        _free_replaced_optimizer()
    wrapped.last.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def _free_replaced_optimizer() -> None:
    """Free the hybrid optimizer that megatron builds first and then replaces with one over this rank's shard.

    It holds a float32 copy of all parameters of the rank, on the host for those that are offloaded. Because it is part of a
    reference cycle, ``gc.freeze`` would keep it for the whole run. Remove this function once megatron builds only the second.
    """
    gc.collect()
    torch.accelerator.empty_host_cache()


def _offload(spec: RankSpec) -> dict[str, Any]:
    """Return the OptimizerConfig fields of optimizer offload; empty if there is no offload or the device is a CPU."""
    return offload_fields(spec.optim.cpu_offload_fraction) if spec.optim.cpu_offload and spec.device == "cuda" else {}


def offload_fields(fraction: float) -> dict[str, Any]:
    """Return the OptimizerConfig fields that keep ``fraction`` of the optimizer on the host (``HybridDeviceOptimizer``)."""
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": fraction,
        "use_precision_aware_optimizer": True,  # the hybrid optimizer then keeps float32 main weights
        "overlap_cpu_optimizer_d2h_h2d": True,
    }


def make_schedule(spec: RankSpec, optimizer: Any) -> OptimizerParamScheduler:
    """Build the learning rate schedule.

    Step it *before* each optimizer step, so that the first uses lr / warmup_steps, not 0. The scheduler also applies
    weight decay per group; without this, norms and biases (wd_mult 0) would decay. Raises ``ConfigError`` as
    ``resolve_schedule`` does.
    """
    optim = resolve_schedule(spec.optim, spec.num_steps)
    decay = optim.decay_steps or spec.num_steps
    if optim.schedule == "constant":
        decay = max(decay, optim.warmup_steps + 1)  # megatron requires an end
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=min(optim.min_lr, optim.lr),
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=decay,
        lr_decay_style=_MEGATRON_STYLE.get(optim.schedule, optim.schedule),
        wsd_decay_steps=optim.wsd_decay_steps,
        lr_wsd_decay_style=optim.wsd_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run uses its config; only the step count is restored
    )
