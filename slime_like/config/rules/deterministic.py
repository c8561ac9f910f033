"""Rules for ``run.deterministic=true``: reproducible tokens, and bitwise agreement of engine and trainer on a CPU."""

from __future__ import annotations

from slime_like.config.schema.names import FAMILIES
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def check_seeds(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if a setting would make a deterministic run's sampled tokens depend on more than the seeds."""
    method = cfg.rollout.sglang.get("speculative_algorithm")
    if cfg.run.deterministic and method is not None:
        raise ConfigError(
            f"rollout.sglang.speculative_algorithm={method} with run.deterministic=true: SGLang ignores the samples' seeds when "
            "it verifies drafts; remove speculative_algorithm, or set run.deterministic=false"
        )


def check_bitwise(cfg: TrainConfig, family: str, dtype: str) -> None:
    """Raise ``ConfigError`` if a setting keeps engine and trainer from agreeing bitwise on a CPU, or tolerates a difference."""
    split_sums = "a sum over a sharded tensor adds in a different order than one over the full tensor"
    for key, value, required, reason in (
        ("model.dtype", dtype, "float32", "the rounding of a bfloat16 matrix product depends on its shape"),
        ("parallel.tp", cfg.parallel.tp, 1, split_sums),
        ("parallel.cp", cfg.parallel.cp, 1, split_sums),
        ("rollout.tp", cfg.rollout.tp, 1, split_sums),
    ):
        if value != required:
            raise ConfigError(
                f"{key}={value} with run.deterministic=true on a CPU: {reason}, and engine and trainer must agree "
                f"bitwise; set {key}={required} (data and pipeline parallelism are allowed), or run.deterministic=false"
            )
    bitwise_families = [name for name, entry in FAMILIES.items() if entry.bitwise]
    if family not in (*bitwise_families, "auto"):
        raise ConfigError(
            f"run.deterministic=true with a model of family {family!r} on a CPU: engine and trainer are known to agree "
            f"bitwise only for {', '.join(bitwise_families)}; set run.deterministic=false"
        )
    if cfg.model.cpu_kernels == "c":
        raise ConfigError(
            "model.cpu_kernels=c with run.deterministic=true: these kernels sum in a different order than the engine; "
            "set model.cpu_kernels=auto, which disables them for deterministic runs"
        )
    if cfg.rollout.cpu_kernels in ("c", "torch"):
        raise ConfigError(
            f"rollout.cpu_kernels={cfg.rollout.cpu_kernels} with run.deterministic=true: these kernels sum in a "
            "different order than the trainer; set rollout.cpu_kernels=auto, which disables them for deterministic runs"
        )
    for name in ("probe_tolerance", "sample_tolerance"):
        if value := getattr(cfg.weights, name):
            raise ConfigError(
                f"weights.{name}={value:g} with run.deterministic=true: on a CPU, engine and trainer must agree "
                f"bitwise; set weights.{name}=null"
            )
