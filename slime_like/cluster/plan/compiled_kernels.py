"""Compile the kernels of a run on a machine without a GPU (``scripts/compile_kernels.py``).

Triton and TileLang compile a kernel when it is launched. Child processes launch the run's kernels on a phantom GPU
(``slime_like.phantom``): a trainer rank takes steps with the run's own configuration (``traced_rank``), and SGLang's functions
are called with the engine's shapes (``slime_like_plugins.compiled_engine``). The compiled kernels are kept in a folder, which
the run uses as its cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slime_like.cluster.plan.machine import described_machine, probe_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.shapes import config_values
from slime_like.cluster.plan.trace import TRACED_GPU, TRACED_RANK, check_traceable, run_on_phantom
from slime_like.config.load.loader import load_config
from slime_like.config.rules.hf import HfConfig, hf_config
from slime_like.config.rules.schedule import without_schedule
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.hardware import GPUS, known_gpu
from slime_like.phantom.autotuning import NO_RESULTS
from slime_like.rollout.engine.cuda_toolkit import toolkit_environment
from slime_like.util.gpus import visible_gpus
from slime_like.util.kernel_cache import cache_variables

ENGINE = "slime_like_plugins.compiled_engine"
SECONDS = 7_200


@dataclass(frozen=True, slots=True)
class CompileJob:
    """Request to compile the kernels of the run of ``argv``, for GPUs of one compute capability.

    ``description`` is the machine of the run, as in ``described_machine``; None for this machine.
    """

    argv: tuple[str, ...]
    description: str | None
    capability: tuple[int, int]
    folder: Path
    first_configs: bool = False  # compile only one configuration of each autotuned kernel


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes and settings of one engine rank that determine its kernels."""

    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_backend: str  # of SGLang; empty: its default
    latent: bool  # latent attention, whose kernels have other shapes
    gdn: tuple[int, int, int, int, int] | None  # key heads, value heads, key dim, value dim, convolution width


def run_capabilities(description: str | None) -> list[tuple[int, int]]:
    """Return the sorted compute capabilities of the GPUs of a described machine, or of this one if ``description`` is None.

    Raises ``ConfigError`` if ``description`` is malformed, if this machine has no GPU, or if a capability is unknown.
    """
    if description is None:
        gpus = [(gpu.name, gpu.capability) for gpu in visible_gpus()]
        if not gpus:
            raise ConfigError("this machine has no GPU: describe those of the run, for example with --plan-for 8xH100")
    else:
        gpus = [(name, None) for name in described_machine(description).gpu_names]
    capabilities: set[tuple[int, int]] = set()
    for name, capability in gpus:
        kind = known_gpu(name)
        capability = capability or (kind and kind.capability)
        if capability is None:
            raise ConfigError(
                f"the compute capability of GPU {name!r} is unknown: add it, for example --capability 9.0, or give one of {', '.join(GPUS)} "
                "to --plan-for"
            )
        capabilities.add(capability)
    return sorted(capabilities)


def compile_trainer(job: CompileJob) -> list[dict[str, Any]]:
    """Compile the kernels of trainer ranks; return their traces.

    Raises ``ConfigError`` if the run cannot be planned or has no trainer on GPUs, or if the compilation fails, and
    ``CheckpointError`` if a model cannot be read.
    """
    check_traceable(_plan(job)[1], "the compilation for the trainer")
    request = {"argv": list(job.argv), "machine": job.description}
    choice = {"own_kernels": True, "first_configs": job.first_configs}
    return run_on_phantom("compilation for the trainer", TRACED_RANK, request | choice, _environment(job), SECONDS)


def compile_engine(job: CompileJob) -> list[dict[str, Any]]:
    """Compile the kernels of an engine rank; return one result per called function, with its error if it failed.

    Raises like ``engine_shape``, and ``ConfigError`` if the child process itself fails.
    """
    request = {"shape": asdict(engine_shape(job)), "first_configs": job.first_configs}
    return run_on_phantom("compilation for the engines", ENGINE, request, _environment(job), SECONDS)


def engine_shape(job: CompileJob) -> EngineShape:
    """Return the shape of a rank of the run's first engine.

    Raises ``ConfigError`` if the run cannot be planned or has no engines on GPUs, or if its model has no config.json yet, and
    ``CheckpointError`` if a model cannot be read.
    """
    cfg, plan = _plan(job)
    values = config_values(cfg)
    if not plan.engines or plan.engines[0].device != "cuda":
        raise ConfigError(
            "this plan has no engines on GPUs: set placement.device=cuda, or describe GPUs with --plan-for 8xH100"
        )
    if values is None:
        raise ConfigError(
            f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} has no config.json yet: run the job's run.prepare"
        )
    return _shape(plan.engines[0], hf_config("model.hf_checkpoint", cfg.model.hf_checkpoint, values), values)


def _plan(job: CompileJob) -> tuple[TrainConfig, Plan]:
    """Return the run's config and plan."""
    cfg = load_config(job.argv, files=False, machine=job.description is None)
    machine = probe_machine() if job.description is None else described_machine(job.description)
    return cfg, make_plan(without_schedule(cfg), machine)


def _shape(engine: EngineSpec, model: HfConfig, values: Mapping[str, Any]) -> EngineShape:
    """Return the shape of an engine's rank, with heads split over the tp / dp_attention ranks that share a sequence."""
    text = values.get("text_config") or values
    tp = max(1, engine.tp // engine.dp_attention)
    gdn = model.gdn
    return EngineShape(
        dtype=engine.dtype,
        num_heads=max(1, model.num_heads // tp),
        num_kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=int(text.get("head_dim") or model.hidden_size // model.num_heads),
        attention_backend=str(engine.sglang.get("attention_backend") or ""),
        latent=model.latent,
        gdn=None
        if gdn is None
        else (max(1, gdn.key_heads // tp), max(1, gdn.value_heads // tp), gdn.key_dim, gdn.value_dim, gdn.conv_width),
    )


def _environment(job: CompileJob) -> dict[str, str]:
    """Return the variables to set in a child's environment.

    They select the phantom GPU, the folder of the compiled kernels and, if no CUDA toolkit is installed, the compiler of
    NVIDIA's wheels. They also disable the caches of autotuning results, which are meaningless on a phantom GPU.
    """
    # The limit is above the largest host tensor of the compilers, which run in the child and need its values.
    gpu = replace(TRACED_GPU, capability=job.capability, host_limit=32 << 20)
    return {**gpu.environment(), **cache_variables(job.folder), **NO_RESULTS, **toolkit_environment(os.environ)}
