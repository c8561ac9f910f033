"""Training of one rollout on one rank: policy, optimizer, reference and teacher weights, advantages."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.algo.bind import bind_loss, bind_token_advantage, token_advantages
from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.names import EXACT_LAYERS
from slime_like.config.schema.resolved import ActorSpec
from slime_like.interfaces import Diagnostics, HasCriticTargets, TokenView
from slime_like.metrics.types import Last, Mean, Metric
from slime_like.train.megatron.model import exact_layers
from slime_like.train.megatron.model.exact_layers import ALL
from slime_like.train.megatron.model.forward import MicroBatch, Scoring, score_micros, to_device
from slime_like.train.megatron.model.model import named_weights
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank.rank_model import OpenRollout, RankModel
from slime_like.train.megatron.step import optim
from slime_like.train.megatron.step.columns import fill, nested
from slime_like.train.megatron.step.drift import Drift
from slime_like.train.megatron.step.step import PolicyStep
from slime_like.train.megatron.weights import initial
from slime_like.train.megatron.weights.export import HFExport, write_hf
from slime_like.types import F32


class GroupSum:
    """``Reduce`` over a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        """Return the element-wise sum; ``value`` is not changed."""
        out = value.clone()
        dist.all_reduce(out, group=self._group)
        return out


class RankTrainer(RankModel):
    """The policy on one rank. Methods are collectives: every rank calls them in the same order."""

    def __init__(self, spec: ActorSpec, rank_info: RankInfo) -> None:
        super().__init__(spec, rank_info)
        self.reference = self._weights_of("model.ref_checkpoint", spec.model.ref_checkpoint, spec.needs_reference)
        self.teacher = self._weights_of("teacher.hf_checkpoint", spec.teacher_checkpoint, spec.swaps_teacher)
        self.scoring = Scoring(spec.temperature, spec.model.logits_chunk)
        loss = bind_loss(spec.algo)
        self.optimizer_step = PolicyStep(self.wrapped, self.optimizer, self.schedule, loss, self.scoring, rank_info)
        self.token_advantage = bind_token_advantage(spec.algo)
        self._reports_advantages = (
            spec.tells_advantages and self.token_advantage is not None and rank_info.speaks_for_shard
        )
        self._export = HFExport(
            self.model, self.family, rank_info
        )  # shared by all pushes: the placement of weights never changes
        self._rollout: OpenRollout | None = None
        # Of the last rollout, if this rank reports them: rows and advantages [T].
        self._last_advantages: list[tuple[PackedBatch, F32]] = []

    # ---- training ------------------------------------------------------------------------------------------------
    def train(
        self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int], version: int
    ) -> tuple[Metric, ...]:
        """Score all rows of a rollout, then take every optimizer step. Returns global metrics on the reporter, else ()."""
        if not steps:  # filters left nothing to train on
            return ()
        self.open_rollout(steps)
        self.estimate({})
        return self.update(num_tokens, version)

    def open_rollout(self, steps: Sequence[Sequence[PackedBatch]]) -> None:
        """Lay out a rollout and score it with every policy of this rank that the algorithm needs."""
        rollout = OpenRollout([[self.micro(rows) for rows in step] for step in steps])
        with rollout.timed():
            rollout.metrics.extend(self._policy_scores(rollout.micros))
        self._rollout = rollout

    def estimate(self, columns: Mapping[str, Columns]) -> Columns | None:
        """Compute advantages of the open rollout from its scores and the ``columns`` of other roles.

        Returns the critic's targets on the rank that speaks for its shard; None elsewhere and without a critic.
        """
        rollout = self._open_rollout()
        with rollout.timed():
            for name, column in columns.items():
                fill(rollout.plan, name, column, self.rank_info)
            rollout.metrics.extend(self._assign_advantages(rollout.micros))
        if not (isinstance(self.token_advantage, HasCriticTargets) and self.rank_info.speaks_for_shard):
            return None
        returns = self.token_advantage.returns([self._view(micro) for micro in rollout.micros])
        return nested([value.cpu().numpy() for value in returns], rollout.plan)

    def update(self, num_tokens: Sequence[int], version: int, *, frozen: bool = False) -> tuple[Metric, ...]:
        """Take the optimizer steps of the open rollout, none if ``frozen``. Returns global metrics on the reporter, else ().

        Raises ``ConsistencyError`` before the first step if engine and trainer disagree on the samples (``Drift``).
        """
        rollout, self._rollout = self._open_rollout(), None
        metrics = rollout.metrics
        columns = ((m.rows, m.advantages) for m in rollout.micros) if self._reports_advantages else ()
        self._last_advantages = [(rows, column.float().cpu().numpy()) for rows, column in columns if column is not None]
        with rollout.timed():
            drift = self._drift(version, rollout, frozen)
            if self.spec.drift_by_layer:
                metrics += self._drift_by_layer(version, rollout)
            if frozen:
                metrics += drift.close()
            for k, (micros, count) in enumerate(zip(rollout.plan, num_tokens, strict=True) if not frozen else ()):
                metrics += self.optimizer_step(micros, count, drift if k == 0 else None)
            optim.settle_weights(self.wrapped)
        metrics += [
            Last("train/num_tokens", float(sum(num_tokens))),
            Last("perf/actor_train_time", rollout.seconds),
        ]
        return tuple(metrics) if self.rank_info.is_reporter else ()

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return the advantages [L] of the given samples' tokens in the last rollout.

        Only samples of this rank's data parallel shard, on the rank that speaks for it; not a collective.
        """
        by_sample: dict[int, F32] = {}
        for rows, column in self._last_advantages:
            for index in np.flatnonzero(np.isin(rows.sample_ids, list(sample_ids))):
                by_sample[int(rows.sample_ids[index])] = column[slice(*rows.cu_seqlens[index : index + 2])]
        return by_sample

    def _drift(self, version: int, rollout: OpenRollout, frozen: bool) -> Drift:
        """Start the comparison with the engine, with the samples that the first optimizer step does not score.

        Samples of the first step are compared in its own forward, which runs after every swap of weights. Samples of later
        steps are compared if the old policy was scored.
        """
        drift = Drift(version, self.rank_info, self.spec.sample_tolerance)
        later = [micro for step in rollout.plan[0 if frozen else 1 :] for micro in step]
        drift.add_columns(later, [micro.old_logprobs for micro in later])
        return drift

    def _drift_by_layer(self, version: int, rollout: OpenRollout) -> list[Metric]:
        """Measure the remaining differences with the layers of each kind in float64, on each rank's first micro-batch."""
        metrics: list[Metric] = []
        micros = rollout.plan[0][:1]
        for kind in (*self.kinds, ALL):
            drift = Drift(version, self.rank_info)
            drift.add_columns(micros, self._scores(micros, kind) or [None])
            metrics += drift.metrics(f"/{kind}")
        return metrics

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of layers of the entire model that can be computed in float64. A collective at the first call."""
        stages: list[tuple[str, ...]] = [()] * self.rank_info.layout.pp
        dist.all_gather_object(stages, exact_layers.kinds(self.model), group=self.rank_info.pp_group)
        return tuple(name for name in EXACT_LAYERS if any(name in kinds for kinds in stages))

    def _open_rollout(self) -> OpenRollout:
        assert self._rollout is not None, "call open_rollout first"
        return self._rollout

    def annotate(self, micros: Sequence[MicroBatch]) -> list[Metric]:
        """Compute scores and advantages of an algorithm without other roles."""
        return [*self._policy_scores(micros), *self._assign_advantages(micros)]

    def _policy_scores(self, micros: Sequence[MicroBatch]) -> list[Metric]:
        """Fill old, reference and teacher log-probabilities, each only if the algorithm needs it."""
        metrics: list[Metric] = []
        if self.spec.needs_old_logprobs:
            metrics.append(self._timed("log_probs", "old_logprobs", micros))
        if self.reference is not None:
            with self.swapped(self.reference):
                metrics.append(self._timed("ref_log_probs", "ref_logprobs", micros))
        if self.teacher is not None:
            with self.swapped(self.teacher):
                metrics.append(self._timed("teacher_log_probs", "teacher_logprobs", micros))
        return metrics

    def _timed(self, name: str, column: str, micros: Sequence[MicroBatch]) -> Metric:
        """Fill ``column`` by scoring trained tokens with the model's current weights. Returns the time it took."""
        start = time.perf_counter()
        for micro, values in self._columns(micros, self._scores(micros)):
            setattr(micro, column, values)
        return Last(f"perf/{name}_time", time.perf_counter() - start)

    def _scores(self, micros: Sequence[MicroBatch], exact: str | None = None) -> list[Tensor]:
        """Return F32 [T] per micro-batch at trained tokens, on the last stage; layers of kind ``exact`` run in float64."""
        masks = [micro.rows.loss_weight > 0 for micro in micros]
        with exact_layers.exact_layers(self.model, exact):
            return score_micros(self.wrapped, micros, masks, self.scoring)

    def _assign_advantages(self, micros: Sequence[MicroBatch]) -> list[Metric]:
        if not self.rank_info.is_last:
            return []
        for micro, column in self._columns(micros, self._advantages(micros)):
            micro.advantages = column
        if not isinstance(self.token_advantage, Diagnostics):
            return []
        views = [self._view(micro) for micro in micros]
        diagnostics = self.token_advantage.diagnose(views, GroupSum(self.rank_info.dp_group))
        return [Mean(f"train/{name}", value) for name, value in diagnostics.items()]

    @staticmethod
    def _columns(
        micros: Sequence[MicroBatch], columns: Sequence[Tensor | None]
    ) -> Iterator[tuple[MicroBatch, Tensor | None]]:
        """Pair micro-batches with their columns; empty except on the last stage."""
        return zip(micros, columns, strict=True) if columns else iter(())

    def _advantages(self, micros: Sequence[MicroBatch]) -> Sequence[Tensor | None]:
        """Return F32 [T] per micro-batch: group advantages repeated over their sequences, or token advantages."""
        if self.token_advantage is not None:
            views = [self._view(micro) for micro in micros]
            return token_advantages(self.spec.algo, self.token_advantage, views, GroupSum(self.rank_info.dp_group))
        out: list[Tensor | None] = []
        for micro in micros:
            rows = micro.rows
            spread = None if rows.advantages is None else np.repeat(rows.advantages, np.diff(rows.cu_seqlens))
            out.append(None if spread is None else to_device(spread, self.rank_info.device))
        return out

    def _view(self, micro: MicroBatch) -> TokenView:
        rows, device = micro.rows, self.rank_info.device
        return TokenView(
            cu_seqlens=to_device(rows.cu_seqlens, device),
            loss_weight=to_device(rows.loss_weight, device),
            rewards=to_device(rows.rewards, device),
            advantages=None if rows.advantages is None else to_device(rows.advantages, device),
            rollout_logprobs=to_device(rows.rollout_logprobs, device),
            old_logprobs=micro.old_logprobs,
            ref_logprobs=micro.ref_logprobs,
            teacher_logprobs=micro.teacher_logprobs,
            values=micro.values,
        )

    def score(self, rows: PackedBatch, exact: str | None = None) -> F32 | None:
        """Return log-probabilities [T] of all but first tokens, on the reporter; layers of kind ``exact`` run in float64."""
        micro = self.micro(rows)
        mask = np.ones(len(rows.token_ids), dtype=np.bool_)
        with exact_layers.exact_layers(self.model, exact):
            scores = score_micros(self.wrapped, [micro], [mask], self.scoring)
        return scores[0].cpu().numpy() if self.rank_info.is_reporter else None

    # ---- other weights -------------------------------------------------------------------------------------------
    def _weights_of(self, key: str, folder: str | None, needed: bool) -> dict[str, Tensor] | None:
        """Return this rank's shards of another checkpoint of the same shape (None: the policy's), on the host."""
        if not needed:
            return None
        if folder in (None, self.spec.model.megatron_checkpoint or self.spec.model.hf_checkpoint):
            return self._host_copy()
        initial.fill(self.model, key, folder, self.table, self.family, self.rank_info, verify=self.spec.verify)
        weights = self._host_copy()
        self._start()
        return weights

    def _host_copy(self) -> dict[str, Tensor]:
        return {key: parameter.detach().cpu().clone() for key, parameter in named_weights(self.model)}

    @contextmanager
    def swapped(self, weights: dict[str, Tensor]) -> Generator[None]:
        """Put ``weights`` into the model, and the policy's back at exit, bit for bit."""
        policy = self._host_copy()
        self._fill(weights)
        try:
            yield
        finally:
            self._fill(policy)

    @torch.no_grad()
    def _fill(self, weights: dict[str, Tensor]) -> None:
        for key, parameter in named_weights(self.model):
            parameter.copy_(weights[key])

    # ---- out and back --------------------------------------------------------------------------------------------
    def export(self) -> HFExport:
        """Return the live weights in HF names."""
        return self._export

    def export_hf(self, folder: Path) -> None:
        """Write the live weights as an HF folder."""
        write_hf(self.export(), self.folder, folder, self.rank_info)
