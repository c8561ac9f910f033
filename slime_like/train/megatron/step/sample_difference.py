"""Comparison of trainer and engine log-probabilities on a rollout's samples, before the first optimizer step.

Axis suffixes: T tokens of the packed batch, N trained tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.data.provenance import provenance
from slime_like.errors import ConsistencyError
from slime_like.metrics.types import Max, Mean, Metric
from slime_like.train.megatron.model.forward import MicroBatch, to_device
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.types import I64

NAME = "train/train_rollout_logprob_abs_diff"
MAX_NAMED = 3  # samples named in an error
CAUSES = (
    "Likely causes: the engine reused keys and values of older weights; the trainer's weights changed after the push; a "
    "sampling option of rollout.sglang or of the generate function changes the engine's distribution; the generate function "
    "moved or replaced log-probabilities; options of model.megatron or rollout.sglang make engine and trainer compute "
    "differently"
)


@dataclass(slots=True)
class SampleLogprobDifference:
    """Differences of log-probabilities, trainer minus engine, of one rollout's trained tokens on this rank."""

    version: int  # version of the trainer's weights
    rank_info: RankInfo
    tolerance: float | None = None  # largest allowed difference; None: no check
    # differences at tokens of samples whose sampled tokens all have the trainer's version
    on_policy: list[Tensor] = field(default_factory=list[Tensor])
    # differences at tokens of the trainer's version in samples of several versions
    mixed: list[Tensor] = field(default_factory=list[Tensor])
    stale: list[Tensor] = field(default_factory=list[Tensor])  # differences at tokens of other versions
    sample_ids: list[I64] = field(default_factory=list[I64])  # id of the sample of each token in ``on_policy``

    @torch.no_grad()
    def add(self, micro: MicroBatch, target_N: I64, logprobs_N: Tensor) -> None:
        """Add the differences at the tokens ``target_N`` of a micro-batch, given the trainer's log-probabilities of them."""
        batch, device = micro.batch, logprobs_N.device
        tokens = provenance(batch, self.version)
        differences_N = logprobs_N.detach() - to_device(batch.rollout_logprobs[target_N], device)
        for differences_of_kind, mask_T in (
            (self.on_policy, tokens.on_policy),
            (self.mixed, tokens.mixed),
            (self.stale, tokens.stale),
        ):
            differences_of_kind.append(differences_N[to_device(np.flatnonzero(mask_T[target_N]), device)])
        self.sample_ids.append(batch.sample_ids[micro.layout.sequence_of(target_N[tokens.on_policy[target_N]])])

    def add_columns(self, micros: Sequence[MicroBatch], columns_T: Sequence[Tensor | None]) -> None:
        """Add the differences at all trained tokens of ``micros``; ``columns_T`` are the trainer's log-probabilities.

        A micro-batch whose column is None is skipped. All cp ranks have the same columns, so only cp rank 0 adds differences.
        """
        if self.rank_info.cp_rank:
            return
        for micro, column_T in zip(micros, columns_T, strict=True):
            if column_T is not None:
                target_N = np.flatnonzero(micro.batch.loss_weight > 0)
                self.add(micro, target_N, column_T[to_device(target_N, column_T.device)])

    def close(self) -> list[Metric]:
        """Return global metrics on the last pipeline stage. A collective of all ranks.

        Unless ``tolerance`` is None, raises ``ConsistencyError`` on every rank if an ``on_policy`` difference is NaN or exceeds
        ``tolerance``. The ``on_policy`` differences are from samples whose sampled tokens all have the trainer's weight version.
        """
        metrics, error = self._compare() if self.rank_info.is_last else ([], None)
        if self.rank_info.layout.pp > 1:
            errors = [error]
            last_rank = dist.get_process_group_ranks(self.rank_info.pp_group)[-1]
            dist.broadcast_object_list(errors, src=last_rank, group=self.rank_info.pp_group)
            (error,) = errors
        if error is not None:
            raise ConsistencyError(error)
        return metrics

    def metrics(self, suffix: str) -> list[Metric]:
        """Return the mean and the maximum of the absolute ``on_policy`` differences over all ranks.

        The list is empty on stages before the last, or if there are no such differences. Collective over the ranks of the last
        stage.
        """
        if not self.rank_info.is_last:
            return []
        magnitudes = np.abs(self._gather()[0])
        if not len(magnitudes):
            return []
        return [Mean(f"{NAME}{suffix}", float(magnitudes.mean())), Max(f"{NAME}_max{suffix}", float(magnitudes.max()))]

    def _compare(self) -> tuple[list[Metric], str | None]:
        """Return global metrics and an error message, which is None if the check passes.

        The check fails if ``tolerance`` is not None and an ``on_policy`` difference is NaN or exceeds it. Collective over the dp
        and cp ranks.
        """
        on_policy, mixed, stale = self._gather()
        num_sampled = len(on_policy) + len(mixed) + len(stale)
        if not num_sampled:  # demonstrations: no engine to compare with
            return [], None
        metrics: list[Metric] = [Mean("train/off_policy_token_ratio", len(stale) / num_sampled)]
        if len(mixed):
            magnitudes = np.abs(mixed)
            metrics.append(Mean(f"{NAME}_mixed", float(magnitudes.mean())))
            metrics.append(Max(f"{NAME}_mixed_max", float(magnitudes.max())))
        if len(stale):
            metrics.append(Mean(f"{NAME}_stale", float(np.abs(stale).mean())))
        if not len(on_policy):
            return metrics, None
        magnitudes = np.abs(on_policy)
        metrics += [
            Mean(NAME, float(magnitudes.mean())),
            Max(f"{NAME}_p99", float(np.quantile(magnitudes, 0.99))),
            Max(f"{NAME}_max", float(magnitudes.max())),
            # as in http://joschu.net/blog/kl-approx.html
            Mean("train/train_rollout_kl_k3", float((np.expm1(on_policy) - on_policy).mean())),
        ]
        magnitudes = np.where(np.isfinite(magnitudes), magnitudes, np.inf)
        if self.tolerance is None or (np.isfinite(magnitudes).all() and magnitudes.max() <= self.tolerance):
            return metrics, None
        return metrics, self._error_message(magnitudes)

    def _error_message(self, magnitudes: Any) -> str:
        """Return the error message for the absolute ``on_policy`` differences of all dp and cp ranks. Collective over them."""
        ids = np.concatenate([np.zeros(0, np.int64), *self.sample_ids])
        (gathered_ids,) = gather_ragged([to_device(ids, self.rank_info.device)], self.rank_info.dp_cp_group)
        global_ids = gathered_ids.cpu().numpy()
        largest_of: dict[int, float] = {}  # sample id -> largest difference
        for index in np.argsort(-magnitudes):
            largest_of.setdefault(int(global_ids[index]), float(magnitudes[index]))
            if len(largest_of) == MAX_NAMED:
                break
        samples = ", ".join(f"{sample_id} ({value:.3g})" for sample_id, value in largest_of.items())
        return (
            f"engine and trainer disagree on samples generated by weights of version {self.version}, the trainer's: "
            f"largest |log-probability difference| {magnitudes.max():.3g}, mean {magnitudes.mean():.3g} "
            f"over {len(magnitudes)} tokens of {len(np.unique(global_ids))} samples, largest in samples {samples}; "
            f"weights.sample_tolerance is {self.tolerance:g}. No optimizer step was taken on this rollout. {CAUSES}"
        )

    def _gather(self) -> list[Any]:
        """Return the differences ``on_policy``, ``mixed`` and ``stale`` of all dp and cp ranks, each F64 [n].

        Collective over these ranks.
        """
        empty = torch.zeros(0, device=self.rank_info.device)
        kinds = [torch.cat([empty, *parts]) for parts in (self.on_policy, self.mixed, self.stale)]
        return [kind.cpu().numpy().astype(np.float64) for kind in gather_ragged(kinds, self.rank_info.dp_cp_group)]


def gather_ragged(vectors_N: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Concatenate each vector over the ranks of ``group``; lengths may differ between ranks. Collective."""
    world = dist.get_world_size(group)
    if world == 1:
        return list(vectors_N)
    local = torch.cat(list(vectors_N))
    own_counts = to_device(np.array([len(vector_N) for vector_N in vectors_N], np.int64), local.device)
    rank_counts = [torch.empty_like(own_counts) for _ in range(world)]
    dist.all_gather(rank_counts, own_counts, group=group)
    counts: list[list[int]] = torch.stack(rank_counts).tolist()  # the only wait for the device
    padded = torch.nn.functional.pad(local, (0, max(map(sum, counts)) - len(local)))
    gathered = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded, group=group)
    parts = [part[: sum(n)].split(n) for part, n in zip(gathered, counts, strict=True)]
    return [torch.cat(vector_N) for vector_N in zip(*parts, strict=True)]
