"""Plan of the trainer's ranks: dtype, family, layout, optimizer and schedule."""

from __future__ import annotations

from dataclasses import replace

from slime_like.cluster.plan.guard import guard_spec, memory_source, releases
from slime_like.cluster.plan.roles import teacher_swap
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.cluster.plan.verify import on_ranks
from slime_like.config.rules.attention import check_attention
from slime_like.config.rules.deterministic import check_bitwise
from slime_like.config.rules.experts import stage_ranks
from slime_like.config.rules.files import family_of
from slime_like.config.rules.hf import HfConfig
from slime_like.config.rules.pipeline import segments
from slime_like.config.rules.schedule import actor_steps, resolve_schedule
from slime_like.config.rules.tree import samples_per_step, trainer_ranks
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.model import ModelConfig, OptimConfig, ParallelConfig
from slime_like.config.schema.resolved import Layout, RankSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def actor_spec(cfg: TrainConfig, model: HfConfig | None, device: str, dtype: str, decisions: PlanDecisions) -> RankSpec:
    """Return the spec of the actor's ranks.

    ``model.gdn`` is not yet resolved: ``resolve_gdn`` does that. ``model.attention``, ``model.cpu_kernels``,
    ``guard.memory`` and, if ``model`` is None, ``model.family`` may stay auto, which the ranks resolve. Raises
    ``ConfigError`` if settings conflict or the model is not supported.
    """
    p, loop = cfg.parallel, cfg.loop
    world = trainer_ranks(cfg)
    if cfg.placement.actor_num_gpus_per_node is None:
        per_node = world // cfg.placement.actor_num_nodes
        decisions.add("placement.actor_num_gpus_per_node", per_node, "tp * pp * cp: one copy of the model")
    dp = world // (p.tp * p.pp * p.cp)
    decisions.add("data parallel size", dp, f"{world} ranks / (tp {p.tp} * pp {p.pp} * cp {p.cp})")
    _add_expert_decision(cfg, world, model, decisions)
    if loop.global_batch_size is None:
        decisions.add("loop.global_batch_size", samples_per_step(cfg), "samples per rollout / loop.steps_per_rollout")
    if p.sequence_parallel and p.tp == 1:
        decisions.add("parallel.sequence_parallel", "false", "parallel.tp is 1")
    optim = _optim(cfg, device, dtype, dp, decisions)
    model_config = _model(cfg, model, dtype, decisions)
    for config in (model_config, optim):
        config.seal()
    spec = RankSpec(
        model=model_config,
        optim=optim,
        algo=cfg.algo,
        layout=_layout(p, dp, model, decisions),
        device=device,
        dtype=dtype,
        temperature=1.0 if isinstance(cfg.algo, SftConfig) else cfg.rollout.temperature,
        num_steps=actor_steps(cfg)[0],
        steps_per_rollout=loop.steps_per_rollout,
        max_tokens_per_rank=p.max_tokens_per_rank,
        seed=cfg.run.seed,
        deadline_s=loop.step_deadline_s,
        deterministic=cfg.run.deterministic,
        teacher_checkpoint=teacher_swap(cfg, decisions.add),
        guard=guard_spec(
            cfg,
            "trainer",
            release=releases(cfg, device, world, decisions.add),
            memory=memory_source(cfg, device, decisions.add),
        ),
        verify=on_ranks(cfg),
        returns_advantages=cfg.run.dump_rollouts,
    )
    check_attention(cfg, device, dtype)
    if cfg.run.deterministic and device == "cpu":
        check_bitwise(cfg, model_config.family, dtype)
    if spec.routing_replay != getattr(cfg.algo, "routing_replay", "off"):
        reason = "loop.steps_per_rollout is 1: the training pass is the pass for old log-probabilities"
        decisions.add("algo.routing_replay", "no effect", reason)
    if spec.needs_reference and cfg.model.ref_checkpoint is None:
        decisions.add("model.ref_checkpoint", model_config.ref_checkpoint, "the policy's initial weights")
    return spec


def _model(cfg: TrainConfig, model: HfConfig | None, dtype: str, decisions: PlanDecisions) -> ModelConfig:
    """Return ``cfg.model`` with its dtype, family and reference checkpoint."""
    config = replace(
        cfg.model,
        dtype=dtype,
        family=cfg.model.family if model is None else family_of(cfg, model),
        ref_checkpoint=cfg.model.ref_checkpoint or cfg.model.megatron_checkpoint or cfg.model.hf_checkpoint,
    )
    if cfg.model.family == "auto":
        reason = "written by run.prepare" if model is None else f"model_type of {model.folder}"
        decisions.add("model.family", config.family, reason)
    return config


def _add_expert_decision(cfg: TrainConfig, world: int, model: HfConfig | None, decisions: PlanDecisions) -> None:
    experts, ep, etp = 0 if model is None else model.num_experts, cfg.parallel.ep, cfg.parallel.etp
    if experts:
        copies = stage_ranks(cfg, world) // (ep * etp)
        shards = f", each over parallel.etp {etp} ranks" if etp > 1 else ""
        decisions.add(
            "experts per rank", experts // ep, f"{experts} experts / parallel.ep {ep}{shards}; copies of each: {copies}"
        )


def _optim(cfg: TrainConfig, device: str, dtype: str, dp: int, decisions: PlanDecisions) -> OptimConfig:
    """Return the optimizer config with its schedule in optimizer steps; unchanged with ``run.mode=rollout_only``.

    Options that have no effect in this run are recorded. Raises ``ConfigError`` if ``optim.cpu_offload`` is set for
    float32 weights on GPUs, or as ``resolve_schedule`` does.
    """
    steps, formula = actor_steps(cfg)
    if cfg.run.mode == "rollout_only":
        return cfg.optim
    optim, parallel = resolve_schedule(cfg.optim, steps, formula), cfg.parallel
    if cfg.optim.decay_steps is None and optim.schedule != "constant":
        decisions.add("optim.decay_steps", steps, formula)
    if cfg.optim.wsd_decay_steps is None and optim.wsd_decay_steps is not None:
        decisions.add("optim.wsd_decay_steps", optim.wsd_decay_steps, "a tenth of optim.decay_steps")
    if cfg.optim.warmup_fraction is not None:
        decisions.add("optim.warmup_steps", optim.warmup_steps, f"{cfg.optim.warmup_fraction:g} of {optim.decay_steps}")
    if optim.cpu_offload and device == "cpu":
        decisions.add(
            "optim.cpu_offload", "no effect", "placement.device is cpu: optimizer state is in host memory anyway"
        )
    if optim.cpu_offload and device == "cuda" and dtype == "float32":
        raise ConfigError(
            "optim.cpu_offload=true with model.dtype=float32: megatron's offload keeps main weights in addition to 16-bit ones; "
            "set model.dtype=bfloat16, or optim.cpu_offload=false"
        )
    if parallel.overlap_grad_reduce and dp * parallel.cp == 1:
        decisions.add(
            "parallel.overlap_grad_reduce",
            "no effect",
            "there is only one data parallel rank, so no gradients are reduced",
        )
    elif parallel.overlap_param_gather and cfg.loop.steps_per_rollout == 1:
        reason = "loop.steps_per_rollout is 1: the push reads all weights after every optimizer step"
        decisions.add("parallel.overlap_param_gather", "no effect", reason)
    return optim


def _layout(p: ParallelConfig, dp: int, model: HfConfig | None, decisions: PlanDecisions) -> Layout:
    """Return the trainer's layout, without pipeline segments if ``model`` is None because ``run.prepare`` has yet to write it."""
    split = segments(p, model.num_layers) if model is not None else ()
    if len(set(split)) > 1 or len(split) > p.pp:
        pipeline_keys = {
            "vpp": p.vpp if p.vpp > 1 else None,
            "layers_per_virtual_stage": p.layers_per_virtual_stage,
            "first_stage_layers": p.first_stage_layers,
            "last_stage_layers": p.last_stage_layers,
            "pipeline_layout": p.pipeline_layout,
        }
        keys = ", ".join(f"parallel.{key} {value}" for key, value in pipeline_keys.items() if value is not None)
        decisions.add(
            "layers per pipeline segment", " ".join(map(str, split)), keys or f"parallel.pp {p.pp} does not divide them"
        )
    return Layout(
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        dp=dp,
        ep=p.ep,
        etp=p.etp,
        sequence_parallel=p.sequence_parallel and p.tp > 1,
        distributed_optimizer=p.distributed_optimizer,
        overlap_grad_reduce=p.overlap_grad_reduce,
        overlap_param_gather=p.overlap_param_gather,
        bucket_size=p.bucket_size,
        vpp=len(split) // p.pp if split else p.vpp,
        segments=split,
    )
