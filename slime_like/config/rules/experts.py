"""Rules for mixture-of-experts models, for ``parallel.ep`` and ``parallel.etp``, and for required sequence parallelism."""

from __future__ import annotations

import math

from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

EXPERT_RECOMPUTE_MODULES = ("moe", "shared_experts")  # values of model.recompute_modules for models with experts only


def stage_ranks(cfg: TrainConfig, world: int) -> int:
    """Return the number of ranks in each pipeline stage if the trainer has ``world`` ranks.

    Raises ``ConfigError`` unless ``ep * etp`` divides this number.
    """
    p = cfg.parallel
    stage = world // p.pp
    if stage % (p.ep * p.etp):
        valid_sizes = ", ".join(str(n) for n in range(1, stage + 1) if stage % (n * p.etp) == 0)
        ranks = math.lcm(p.tp * p.cp, p.ep * p.etp) * p.pp
        sizes = f"parallel.ep={p.ep}" + (f" * parallel.etp={p.etp} = {p.ep * p.etp}" if p.etp > 1 else "")
        change = f"parallel.ep to one of {valid_sizes}" if valid_sizes else f"parallel.etp to a divisor of {stage}"
        raise ConfigError(
            f"{sizes} does not divide the {stage} ranks of a pipeline stage (parallel.tp {p.tp} * parallel.cp "
            f"{p.cp} * data parallel {stage // (p.tp * p.cp)}), which share the experts: set {change}, or "
            f"set placement.actor_num_gpus_per_node so that the trainer has a multiple of {ranks} ranks"
        )
    return stage


def check_experts(cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if settings for experts, or the lack of sequence parallelism, do not fit the model."""
    p, experts = cfg.parallel, model.num_experts
    check_sequence_parallel("parallel.tp", p.tp, cfg, model)
    if not experts:
        for key, size in (("ep", p.ep), ("etp", p.etp)):
            if size > 1:
                raise ConfigError(
                    f"parallel.{key}={size}: the model in {model.folder} (model_type {model.model_type}) has no experts to "
                    f"distribute; set parallel.{key}=1"
                )
        if cfg.model.recompute == "selective" and (
            unused := [m for m in cfg.model.recompute_modules if m in EXPERT_RECOMPUTE_MODULES]
        ):
            raise ConfigError(
                f"model.recompute_modules={unused}: the model in {model.folder} has no experts; remove {' and '.join(unused)}"
            )
        return
    if experts % p.ep:
        valid_sizes = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        raise ConfigError(
            f"parallel.ep={p.ep} does not divide the {experts} experts of the model in {model.folder}: set parallel.ep to one of {valid_sizes}"
        )
    if model.expert_width % p.etp:
        raise ConfigError(
            f"parallel.etp={p.etp} does not divide the intermediate size {model.expert_width} of the experts of the model in "
            f"{model.folder}: set parallel.etp to a divisor of {model.expert_width}"
        )


def check_sequence_parallel(key: str, tp: int, cfg: TrainConfig, model: HfConfig) -> None:
    """Raise ``ConfigError`` if ``tp`` > 1 (set by ``key``) needs sequence parallelism for this model, but it is off.

    Models with experts or latent attention need it.
    """
    if tp == 1 or cfg.parallel.sequence_parallel:
        return
    if model.num_experts:
        kind, reason = "experts", "would send the same tokens to the experts"
    elif model.latent:
        kind, reason = (
            "latent attention",
            "would have only its own heads' part of the gradient of the keys that all heads share",
        )
    else:
        return
    raise ConfigError(
        f"{key}={tp} with parallel.sequence_parallel=false and a model with {kind} ({model.folder}): every tensor "
        f"parallel rank {reason}; set parallel.sequence_parallel=true"
    )
