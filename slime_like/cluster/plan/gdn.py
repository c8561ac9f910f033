"""Plan of Gated DeltaNet layers: select their kernels and check that these run on this machine."""

from __future__ import annotations

from dataclasses import replace

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import PlanDecisions
from slime_like.config.rules.gdn import check_optimizer, check_runtime
from slime_like.config.rules.hf import HfConfig
from slime_like.config.schema.gdn import gdn_backend, gdn_cp_mode
from slime_like.config.schema.resolved import RankSpec
from slime_like.config.schema.root import TrainConfig


def resolve_gdn(
    cfg: TrainConfig, actor: RankSpec, model: HfConfig | None, machine: Machine, decisions: PlanDecisions
) -> RankSpec:
    """Return ``actor`` with ``model.gdn.backend`` and ``model.gdn.auto_cp`` resolved; record all decisions.

    Raises ``ConfigError`` if ``model.gdn.cp_mode`` does not suit the layout, if the run trains Gated DeltaNet layers with an
    optimizer that Megatron could not save, or if it trains on this machine and the layers' kernels cannot run here.
    """
    config = cfg.model.gdn
    backend = gdn_backend(config.backend, actor.device)
    auto_cp, auto_cp_reason = _auto_cp(config.auto_cp, backend, actor)
    if model is None or model.gdn is not None:
        if config.backend == "auto":
            decisions.add("model.gdn.backend", backend, f"placement.device is {actor.device}")
        if backend == "flashqla" and config.auto_cp is None:
            decisions.add("model.gdn.auto_cp", str(auto_cp).lower(), auto_cp_reason)
        if model is not None and model.gdn is not None and actor.layout.cp > 1:
            sizes = {"tp": actor.layout.tp, "cp": actor.layout.cp}
            mode, reason = gdn_cp_mode(config.cp_mode, model.gdn.key_heads, model.gdn.value_heads, **sizes)
            if config.cp_mode == "auto":
                decisions.add("model.gdn.cp_mode", mode, reason)
        if config.allow_unvalidated:
            decisions.add("model.gdn.allow_unvalidated", "true", "flashqla may run where it has not been validated")
    if model is not None and cfg.run.mode != "rollout_only":
        check_optimizer(cfg, model, actor.dtype)
    local = cfg.placement.ray_address is None and machine.kernels is not None and cfg.run.mode != "rollout_only"
    if model is not None and model.gdn is not None and local and machine.kernels is not None:
        check_runtime(config, replace(machine.kernels, device=actor.device), actor.dtype, model.gdn)
    model_config = replace(actor.model, gdn=replace(config, backend=backend, auto_cp=auto_cp))
    model_config.seal()
    return replace(actor, model=model_config)


def _auto_cp(setting: bool | None, backend: str, actor: RankSpec) -> tuple[bool, str]:
    """Return True if FlashQLA may split sequences automatically, and the reason.

    The reason is empty if the config decides or ``backend`` is not FlashQLA. With the split, log-probabilities of a no-grad
    pass differ bitwise from those of the update.
    """
    if setting is not None or backend != "flashqla":
        return bool(setting), ""
    if actor.deterministic:
        return False, "run.deterministic: the split depends on the other sequences of a batch"
    if actor.needs_old_logprobs:
        return (
            False,
            "old log-probabilities come from a separate pass and must be bitwise identical to those of the update",
        )
    return True, "the update's own forward gives the old log-probabilities"
