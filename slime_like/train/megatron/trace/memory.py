"""Memory of one trainer rank over a rollout, traced on a phantom GPU: peaks per phase, and the parts that stay allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from slime_like.batch import PackedBatch
from slime_like.config.schema.guard_policy import NO_GUARD
from slime_like.config.schema.residency import COLLECT, GRADIENTS, PUSH, STEP, TRAINER_PHASES, WEIGHTS
from slime_like.config.schema.resolved import RankSpec
from slime_like.phantom.counters import CallCounts, pageable_bytes, pinned_bytes, read_counts
from slime_like.planner.trainer import BUILD
from slime_like.train.megatron.trace import solo

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.trainer import RankTrainer

PUSH_BYTES = 512 << 20  # bucket size of a weight push
TRANSFER = "transfer"  # traced phase of a push, for which the planner has no estimate


@dataclass(frozen=True, slots=True)
class TracedBatch:
    """Micro-batches of a traced step, and the length of their sequences."""

    length: int  # tokens of a sequence
    num_micro_batches: int
    trained_share: float = 1.0  # share of the tokens that are trained on; the others are prompts


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """Peak of torch's allocator in one phase, in bytes."""

    name: str  # build | step | transfer; with placement.offload_train also push | collect
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Traced memory of a rank in bytes, and the ``CallCounts`` of its second rollout.

    ``pinned`` and ``pageable`` are host memory at the end of the trace: page-locked blocks as torch's allocator rounds them, and
    pageable tensors larger than the phantom GPU's ``host_limit``. torch keeps pinned blocks, so ``pinned`` includes those of
    earlier phases.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    pinned: int
    pageable: int
    phases: tuple[PhasePeak, ...]
    calls: CallCounts

    @property
    def resident(self) -> int:
        """Bytes of GPU memory that stay allocated between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> PhasePeak:
        """The phase with the highest peak of allocated memory."""
        return max(self.phases, key=lambda phase: phase.allocated)


def trace_rank(spec: RankSpec, rank: int, batch: TracedBatch, *, offload: bool = False) -> RankTrace:
    """Trace rank ``rank`` of the policy with uninitialised weights; only config.json of the model is read.

    With ``offload``, the rank's state leaves the device as with ``placement.offload_train``. The process must run on a phantom
    GPU, and the first call in a process must precede the first import of megatron. Raises ``torch.OutOfMemoryError`` if the
    rank does not fit on the GPU, and ``ConfigError`` as ``solo.join`` and ``RankTrainer`` do.
    """
    spec = replace(spec, guard=NO_GUARD, sample_tolerance=None, drift_by_layer=False)
    info = solo.join(spec, rank)
    from slime_like.train.megatron.trace.unloaded import UnloadedTrainer

    gc.collect()
    torch.cuda.empty_cache()
    torch.accelerator.empty_host_cache()
    host_base = pinned_bytes(), pageable_bytes()
    base = torch.cuda.memory_allocated()  # memory of an earlier trace in this process
    peaks = _Peaks([], base, torch.cuda.memory_reserved())
    trainer = peaks.during(BUILD, lambda: UnloadedTrainer(spec, info))
    micros = [_micro_batch(spec, batch, seed) for seed in range(batch.num_micro_batches)]
    steps = [micros] * min(2, spec.steps_per_rollout)  # of several steps, all but the first need the same memory
    counts = [int((micro.loss_weight > 0).sum()) * len(micros) * spec.layout.dp for micro in micros[:1]] * len(steps)
    first = micros if spec.layout.pp > 1 else micros[:1]  # a pipeline needs several micro-batches
    trainer.train_rollout([first], counts[:1])  # allocates the optimizer's state
    before = read_counts()
    peaks.during(STEP, lambda: trainer.train_rollout(steps, counts))
    calls = read_counts() - before
    gc.collect()
    sizes = {part: trainer.device_state.num_bytes(part) for part in (WEIGHTS, GRADIENTS)}
    optimizer = max(0, torch.cuda.memory_allocated() - base - sum(sizes.values()))
    _trace_push(trainer, micros[0], peaks, offload=offload)
    on_host = pinned_bytes() - host_base[0], pageable_bytes() - host_base[1]
    return RankTrace(rank, sizes[WEIGHTS], sizes[GRADIENTS], optimizer, *on_host, tuple(peaks.phases), calls)


def _trace_push(trainer: RankTrainer, batch: PackedBatch, peaks: _Peaks, *, offload: bool) -> None:
    """Record the peak of a weight transfer; with ``offload``, also the peaks of phases ``PUSH`` and ``COLLECT``.

    In ``PUSH``, the trainer runs one forward pass, as the probe of pushed weights does. With virtual stages, it runs none.
    """
    if offload:
        trainer.device_state.keep(TRAINER_PHASES[PUSH])
        gc.collect()

    def transfer() -> None:
        for _ in trainer.hf_export.buckets(PUSH_BYTES):
            pass

    def probe() -> None:
        if trainer.spec.layout.vpp == 1:  # with virtual stages, the padding micro-batches have other shapes
            trainer.score(batch)

    peaks.during(TRANSFER, transfer)
    if offload:
        torch.cuda.empty_cache()  # as a push does before the engine allocates its KV cache
        peaks.during(PUSH, probe)
        trainer.device_state.keep(TRAINER_PHASES[COLLECT])
        gc.collect()
        peaks.during(COLLECT, lambda: None)


@dataclass(frozen=True, slots=True)
class _Peaks:
    phases: list[PhasePeak]
    allocated: int  # before the trace
    reserved: int

    def during[T](self, name: str, function: Callable[[], T]) -> T:
        """Run ``function``, record its peak of GPU memory as phase ``name``, and return its result."""
        torch.cuda.reset_peak_memory_stats()
        result = function()
        allocated = torch.cuda.max_memory_allocated() - self.allocated
        self.phases.append(PhasePeak(name, allocated, torch.cuda.max_memory_reserved() - self.reserved))
        return result


def _micro_batch(spec: RankSpec, batch: TracedBatch, seed: int) -> PackedBatch:
    """Return a micro-batch that fills ``max_tokens_per_rank`` on every context parallel rank."""
    max_tokens = spec.max_tokens_per_rank * spec.layout.cp
    length = min(batch.length, max_tokens)
    lengths = [length] * (max_tokens // length) + ([max_tokens % length] if max_tokens % length > 1 else [])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    trained_T = np.ones(int(bounds[-1]), np.bool_)
    for start, num_tokens in zip(bounds, lengths, strict=False):
        trained_T[start : start + max(1, round(num_tokens * (1 - batch.trained_share)))] = False
    weight = np.where(trained_T, 1.0 / max(1, int(trained_T.sum())), 0.0).astype(np.float32)
    return PackedBatch(
        token_ids=np.full(len(trained_T), seed % 2, np.int32),
        cu_seqlens=bounds,
        loss_weight=weight,
        versions=np.where(trained_T, 0, -1).astype(np.int32),
        rollout_logprobs=np.zeros(len(trained_T), np.float32),
        rewards=np.zeros(len(lengths), np.float32),
        advantages=np.zeros(len(lengths), np.float32),
        sample_ids=np.arange(len(lengths), dtype=np.int64),
    )
