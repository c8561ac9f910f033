"""Number of requests that an engine can run at the same time, the factor that limits it, and the effect of other layouts.

``phases`` returns the memory of a GPU that an engine shares with a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.hardware import Hardware
from slime_like.planner.engine import ENGINE_REMAINDER, EngineMemory, engine_memory, useful_dcp
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.flow_mla import FLOW_CHOICES, flow_projections
from slime_like.planner.shapes import ModelShape
from slime_like.planner.speed import Throughput, Workload, throughput
from slime_like.planner.table import MemoryTable


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Memory, number of requests and throughput of one engine layout under a workload."""

    settings: EngineSettings
    memory: EngineMemory
    batch: int  # requests of the workload's length that fit KV cache and recurrent states
    steady: Throughput | None  # None if nothing fits

    @property
    def limit(self) -> str:
        """Name of the factor that limits the number of running requests."""
        if self.batch < 1:
            if self.memory.pool <= 0:
                return "weights"
            short = "recurrent states, which have" if self._limited_by_states else "the KV cache, which has"
            return f"{short} no room for one request"
        if self.settings.max_running is not None and self.settings.max_running <= self.batch:
            return "max_running_requests"
        return "recurrent states" if self._limited_by_states else "the KV cache"

    @property
    def _limited_by_states(self) -> bool:
        return bool(self.memory.slot_bytes) and self.batch == self.memory.groups * self.memory.state_requests


@dataclass(frozen=True, slots=True)
class Phases:
    """Memory of a shared GPU during training and during sampling, for one way in which trainer and engine share it."""

    name: str
    training: float  # bytes
    sampling: float
    kv_bytes: float  # maximum for the engine's keys and values on this GPU


TRAINER_REMAINDER = ("CUDA context", "communicators")
"""Items that stay on the device after a trainer rank has moved its tensors to the host."""


def phases(
    engine: MemoryTable, releasable_engine: MemoryTable, trainer: MemoryTable, available: float
) -> tuple[Phases, ...]:
    """Return the memory in training and in sampling of a GPU that trainer and engine share, for three ways of sharing.

    The ways are: both keep their memory, only the engine releases its memory, each releases its memory while the other runs.
    ``releasable_engine`` is the engine without CUDA graphs of prefill, which SGLang cannot release by default.
    ``available``: bytes of the GPU.
    """
    engine_remainder, trainer_remainder = releasable_engine.of(*ENGINE_REMAINDER), trainer.of(*TRAINER_REMAINDER)
    return tuple(
        Phases(
            name,
            trainer.total + other_training,
            sampling_engine.total + other_sampling,
            max(0.0, available - (sampling_engine.total - sampling_engine.of("KV cache")) - other_sampling),
        )
        for name, sampling_engine, other_training, other_sampling in (
            ("both stay", engine, engine.total, trainer.total),
            ("the engine releases its memory", releasable_engine, engine_remainder, trainer.total),
            ("they take turns", releasable_engine, engine_remainder, trainer_remainder),
        )
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Change of an engine layout, named by the command-line flags that make it."""

    flag: str
    answer: EngineAnswer


def answer(shape: ModelShape, settings: EngineSettings, hardware: Hardware, workload: Workload) -> EngineAnswer:
    """Return memory, batch and throughput of one layout. Raises ``ConfigError`` if the layout is impossible."""
    memory = engine_memory(shape, settings, hardware)
    steady = throughput(shape, settings, hardware, workload)
    return EngineAnswer(settings, memory, memory.requests(workload.cached_tokens), steady)


def changes(shape: ModelShape, settings: EngineSettings, hardware: Hardware, workload: Workload) -> Iterator[Change]:
    """Yield each applicable change to the layout, with the effect of this change alone."""
    for flag, new_settings in _candidates(shape, settings, hardware):
        yield Change(flag, answer(shape, new_settings, hardware, workload))


def _candidates(
    shape: ModelShape, settings: EngineSettings, hardware: Hardware
) -> Iterator[tuple[str, EngineSettings]]:
    size = settings.dcp * 2
    while size <= useful_dcp(shape, settings):
        if settings.attention_tp % size == 0:
            yield f"--dcp {size}", replace(settings, dcp=size)
        size *= 2
    if settings.gpus > 1 and settings.dp_attention == 1 and settings.dcp == 1 and shape.latent is not None:
        spread = replace(settings, dp_attention=settings.gpus, replicated_head=True)
        yield f"--dp-attention {settings.gpus}", spread
        for choice in FLOW_CHOICES:
            sharded = replace(spread, flow_mla=flow_projections(shape, choice))
            yield f"--dp-attention {settings.gpus} --flow-mla {choice}", sharded
    elif shape.latent is not None and settings.dp_attention > 1 and not settings.flow_mla:
        for choice in FLOW_CHOICES:
            yield f"--flow-mla {choice}", replace(settings, flow_mla=flow_projections(shape, choice))
    if settings.gpus * 2 <= hardware.num_gpus and settings.dp_attention == 1 and shape.heads % (2 * settings.gpus) == 0:
        yield f"--tp {2 * settings.gpus}", replace(settings, gpus=2 * settings.gpus)
    if settings.kv_bytes > 1:
        yield "--kv fp8", replace(settings, kv_bytes=1)
    if settings.weights != "fp8" and hardware.gpu.fp8 > hardware.gpu.bf16:
        yield "--weights fp8", replace(settings, weights="fp8")
    if not settings.tuned:
        yield "--static most", replace(settings, static=None, tuned=True)
