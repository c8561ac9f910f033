"""Gradient buckets, AdamW and its schedule, all megatron's."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime_like.config.resolved import ActorSpec
from slime_like.errors import ConfigError
from slime_like.train.megatron import host
from slime_like.train.megatron.model import Policy
from slime_like.train.megatron.transformer_config import dtype_of


def wrap(spec: ActorSpec, model: Policy) -> Any:
    """The model in megatron's DDP: float32 gradient buffers, reduced over dp (scattered for the distributed optimizer)."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.layout.distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    wrapped = DistributedDataParallel(model.config, config, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def make_optimizer(spec: ActorSpec, wrapped: Any) -> Any:
    """Megatron's optimizer over this rank's parameters (its shard of them, with the distributed optimizer)."""
    optim, dtype = spec.optim, dtype_of(spec)
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=min(optim.min_lr, optim.lr),
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad or float("inf"),  # the norm is measured even where nothing is clipped
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=spec.layout.distributed_optimizer,
    )
    with host.building_optimizer():
        optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
    wrapped.module.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def make_schedule(spec: ActorSpec, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate per optimizer step, to be stepped *before* each: the first step has lr / warmup_steps, not 0.

    The scheduler also applies weight decay per group: without it, norms and biases (wd_mult 0) would decay.
    """
    optim = spec.optim
    decay = optim.decay_steps or spec.num_steps
    if optim.schedule == "constant":
        decay = max(decay, optim.warmup_steps + 1)
    if optim.warmup_steps >= decay:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} leaves nothing of optim.decay_steps={decay}: lower it, or use optim.schedule=constant"
        )
    if optim.min_lr > optim.lr and optim.schedule != "constant":
        raise ConfigError(f"optim.min_lr={optim.min_lr} is above optim.lr={optim.lr}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=min(optim.min_lr, optim.lr),
        lr_warmup_steps=optim.warmup_steps,
        lr_decay_steps=decay,
        lr_decay_style=optim.schedule,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,  # a resumed run follows its own config; only the step count is restored
    )
