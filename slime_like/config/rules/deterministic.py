"""Rules of ``run.deterministic=true``: settings that break reproducibility are refused."""

from __future__ import annotations

from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

FAMILIES = ("qwen3",)  # tested: engine and trainer agree in every bit


def check_seeds(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if seeds would not determine the tokens."""
    method = cfg.rollout.sglang.get("speculative_algorithm")
    if cfg.run.deterministic and method is not None:
        raise ConfigError(
            f"rollout.sglang.speculative_algorithm={method} with run.deterministic=true: SGLang verifies drafts without the "
            "seeds of samples; remove it, or set run.deterministic=false"
        )


def check_bits(cfg: TrainConfig, family: str, dtype: str) -> None:
    """Raise ``ConfigError`` if engine and trainer could not agree bitwise on a CPU."""
    split_sums = "sums over a tensor that is split have another order than sums over the whole"
    for key, value, required, reason in (
        ("model.dtype", dtype, "float32", "bfloat16 products round by shape"),
        ("parallel.tp", cfg.parallel.tp, 1, split_sums),
        ("parallel.cp", cfg.parallel.cp, 1, split_sums),
        ("rollout.tp", cfg.rollout.tp, 1, split_sums),
    ):
        if value != required:
            raise ConfigError(
                f"{key}={value} with run.deterministic=true on a CPU: {reason}, and engine and trainer must agree in "
                f"every bit; set {key}={required} (data and pipeline parallelism keep the bits), or run.deterministic=false"
            )
    if family not in (*FAMILIES, "auto"):
        raise ConfigError(
            f"run.deterministic=true with a model of family {family!r} on a CPU: engine and trainer are known to agree in "
            f"every bit for {', '.join(FAMILIES)} only; set run.deterministic=false"
        )
    if cfg.model.cpu_kernels == "c":
        raise ConfigError(
            "model.cpu_kernels=c with run.deterministic=true: sums of these kernels have another order than the engine's; "
            "set model.cpu_kernels=auto, which leaves them out then"
        )
    if cfg.rollout.cpu_kernels in ("c", "torch"):
        raise ConfigError(
            f"rollout.cpu_kernels={cfg.rollout.cpu_kernels} with run.deterministic=true: sums of these kernels have another "
            "order than the trainer's; set rollout.cpu_kernels=auto, which leaves them out then"
        )
    for name in ("probe_tolerance", "sample_tolerance"):
        if value := getattr(cfg.weights, name):
            raise ConfigError(
                f"weights.{name}={value:g} with run.deterministic=true: on a CPU engine and trainer may not differ in one "
                f"bit; set weights.{name}=null"
            )
