"""One rank of the policy: scores, advantages and optimizer steps of a rollout; reference and teacher weights; HF export."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from slime_like.algo.bind import bind_loss, bind_token_advantage, critic_targets, diagnose, token_advantages
from slime_like.algo_interfaces import Diagnostics, ReturnEstimator, TokenView
from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.names import FLOAT64_LAYERS
from slime_like.config.schema.resolved import RankSpec
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.data.routing import OWN_EXPERTS, RoutingDifference
from slime_like.distributed.wrapper import install
from slime_like.interfaces import MultiKernelLayer
from slime_like.metrics.types import Last, Mean, Metric
from slime_like.train.megatron.model import float64_layers
from slime_like.train.megatron.model.float64_layers import ALL
from slime_like.train.megatron.model.forward import LogprobSettings, MicroBatch, score_micros, to_device
from slime_like.train.megatron.model_io.export import HFExport, write_hf
from slime_like.train.megatron.platform.collective import GroupSum
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank.rank_model import OpenRollout, RankModel
from slime_like.train.megatron.step import optim
from slime_like.train.megatron.step.routing import RoutingReplay
from slime_like.train.megatron.step.sample_difference import SampleLogprobDifference
from slime_like.train.megatron.step.step import PolicyStep
from slime_like.types import F32


class RankTrainer(RankModel):
    """The policy on one rank.

    Methods that compute, save or load are collectives: every rank calls them in the same order. Exactly one rank of the
    world is the reporter, which alone returns global metrics and the results of ``score``.
    """

    def __init__(self, spec: RankSpec, rank_info: RankInfo) -> None:
        """Load the weights of the policy, and of the reference and teacher that this rank swaps in; build the optimizer.

        Raises ``ConfigError`` on a model or setting that is invalid or unsupported on this machine, and ``CheckpointError`` on an
        unusable checkpoint.
        """
        super().__init__(spec, rank_info)
        reference, teacher = spec.model.ref_checkpoint, spec.teacher_checkpoint
        self.reference = self.read_weights("model.ref_checkpoint", reference) if spec.needs_reference else None
        self.teacher = self.read_weights("teacher.hf_checkpoint", teacher) if spec.swaps_teacher else None
        self.logprob_settings = LogprobSettings(spec.temperature, spec.model.logits_chunk)
        loss = bind_loss(spec.algo)
        self.optimizer_step = PolicyStep(
            self.wrapped, self.optimizer, self.schedule, loss, self.logprob_settings, rank_info
        )
        self.routing = RoutingReplay(self.wrapped, rank_info, spec)
        self.token_advantage = bind_token_advantage(spec.algo)
        self._reports_advantages = (
            spec.returns_advantages and self.token_advantage is not None and rank_info.is_shard_reporter
        )
        self.hf_export = HFExport(self.model, self.family, rank_info)  # for all pushes: weights stay in place
        self._last_advantages: list[tuple[PackedBatch, F32]] = []  # batches and advantages [T] of the last rollout

    # ---- experts ---------------------------------------------------------------------------------------------------
    def lay_out(self, batch: PackedBatch) -> MicroBatch:
        """Lay out one micro-batch as ``RankModel.lay_out`` does, with the engine's experts if they are replayed."""
        return self.routing.attach(super().lay_out(batch))

    @install.phase("score")
    def routing_difference(self) -> RoutingDifference | None:
        """Return the comparison of replayed experts with the routers' own choice since the last call or the last update.

        None except on the reporter. Collective.
        """
        difference = self.routing.difference()
        return difference if self.rank_info.is_reporter else None

    # ---- training ------------------------------------------------------------------------------------------------
    def train_rollout(self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Score all batches of one rollout, then take its optimizer steps.

        ``steps[k]`` are this dp rank's batches of optimizer step k, ``num_tokens[k]`` the step's global count of trained
        tokens. The reporter returns the metrics of all ranks; every rank adds its own ``comm/...`` and ``guard/...`` metrics.
        Raises the errors of ``open_rollout``, ``compute_advantages`` and ``update``.
        """
        metrics: tuple[Metric, ...] = ()
        with install.phase("step"):
            if steps:  # empty if filters dropped every sample
                self.open_rollout(steps)
                self.compute_advantages({})
                metrics = self._update(num_tokens, frozen=False)
        return self._end_rollout(metrics)

    @install.phase("step")
    def open_rollout(self, steps: Sequence[Sequence[PackedBatch]]) -> None:
        """Run the first part of ``train_rollout``: score the batches with each policy of this rank that the algorithm needs.

        Raises ``DataError`` as ``lay_out`` does.
        """
        rollout = self.open(steps)
        rollout.metrics.extend(self._policy_scores(rollout.micros))

    @install.phase("step")
    def compute_advantages(self, columns: Mapping[str, Columns]) -> Columns | None:
        """Run the second part of ``train_rollout``: compute advantages from scores and the ``columns`` of other roles.

        Return the critic's targets on the reporter of each shard; None on other ranks, or if there is no critic. Raises
        ``UserCodeError`` if a user's token advantage fails.
        """
        rollout = self.rollout
        for name, column in columns.items() if self.rank_info.is_last else ():
            rollout.fill(name, column, self.rank_info.device)
        rollout.metrics.extend(self._assign_advantages(rollout.micros))
        has_critic = isinstance(self.spec.algo, PpoConfig)
        if not (has_critic and isinstance(self.token_advantage, ReturnEstimator) and self.rank_info.is_shard_reporter):
            return None
        views = [self._view(micro) for micro in rollout.micros]
        return rollout.group_by_step(critic_targets(self.spec.algo, self.token_advantage, views))

    def update(self, num_tokens: Sequence[int], *, frozen: bool) -> tuple[Metric, ...]:
        """Run the last part of ``train_rollout``: take the optimizer steps of the open rollout, none if ``frozen``.

        Raises ``ConsistencyError`` before the first step if log-probabilities of engine and trainer differ by more than
        ``weights.sample_tolerance`` (``SampleLogprobDifference``), and ``UserCodeError`` as the loss and ``StepReport`` do.
        """
        with install.phase("step"):
            metrics = self._update(num_tokens, frozen=frozen)
        return self._end_rollout(metrics)

    def _end_rollout(self, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
        """Count the rollout, even if the actor is frozen or the rollout is empty.

        Return ``metrics``, then this rank's ``comm/...`` and ``guard/...`` metrics since the last call.
        """
        self.version += 1
        return (*metrics, *install.drain())

    def _update(self, num_tokens: Sequence[int], *, frozen: bool) -> tuple[Metric, ...]:
        """Close the rollout and, unless ``frozen``, take its optimizer steps. Return global metrics on the reporter, else ()."""
        rollout = self.close()
        metrics = rollout.metrics
        columns = ((m.batch, m.advantages) for m in rollout.micros) if self._reports_advantages else ()
        self._last_advantages = [
            (batch, column.float().cpu().numpy()) for batch, column in columns if column is not None
        ]
        sample_difference = self._sample_difference(rollout, frozen)
        if self.spec.drift_by_layer:
            metrics += self._drift_by_layer(rollout)
        if frozen:
            metrics += sample_difference.close()
        start = time.perf_counter()
        with self.routing.in_training(rollout.micros):
            for k, (micros, num_step_tokens) in enumerate(
                () if frozen else zip(rollout.micros_by_step, num_tokens, strict=True)
            ):
                metrics += self.optimizer_step(micros, num_step_tokens, sample_difference if k == 0 else None)
        metrics += self.routing.metrics()
        optim.gather_parameters(self.wrapped)
        metrics += [
            Last("train/num_tokens", float(sum(num_tokens))),
            Last("perf/actor_train_time", time.perf_counter() - start),
        ]
        return tuple(metrics) if self.rank_info.is_reporter else ()

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return, by sample id, the advantages [L] of the L tokens of each given sample. Not a collective.

        The dict contains only samples of the last rollout that was not empty, and of this rank's data parallel shard. It is
        empty unless this rank is the shard's reporter, ``RankSpec.returns_advantages`` is set and the algorithm has token
        advantages.
        """
        by_sample: dict[int, F32] = {}
        for batch, column in self._last_advantages:
            for index in np.flatnonzero(np.isin(batch.sample_ids, list(sample_ids))):
                by_sample[int(batch.sample_ids[index])] = column[slice(*batch.cu_seqlens[index : index + 2])]
        return by_sample

    def _sample_difference(self, rollout: OpenRollout, frozen: bool) -> SampleLogprobDifference:
        """Start the comparison with the engine: add the samples of all optimizer steps except the first.

        If ``frozen``, add those of the first step too. A sample is added here only if the old policy scored it. The first step
        adds its own samples in its forward pass, which runs after every swap of weights, so the comparison would also detect
        weights that were not restored.
        """
        sample_difference = SampleLogprobDifference(self.version, self.rank_info, self.spec.sample_tolerance)
        later = [micro for micros in rollout.micros_by_step[0 if frozen else 1 :] for micro in micros]
        sample_difference.add_columns(later, [micro.old_logprobs for micro in later])
        return sample_difference

    def _drift_by_layer(self, rollout: OpenRollout) -> list[Metric]:
        """Measure how much log-probabilities of trainer and engine differ if layers of the trainer run in float64.

        Each rank uses its first micro-batch. There is one measurement per kind of layer, and one with all kinds in float64. If
        the engine's experts are replayed, there is one more: with the routers' own experts, and no layer in float64.
        """
        metrics: list[Metric] = []
        micros = rollout.micros_by_step[0][:1]
        for kind in (*self.model_layer_kinds, ALL):
            with self.routing.replay(micros, compare=False):
                metrics += self._drift(micros, kind, kind)
        if self.spec.routing_replay == "rollout":
            metrics += self._drift(micros, OWN_EXPERTS, None)
        return metrics

    def _drift(self, micros: Sequence[MicroBatch], name: str, float64_kind: str | None) -> list[Metric]:
        sample_difference = SampleLogprobDifference(self.version, self.rank_info)
        sample_difference.add_columns(micros, self._scores(micros, float64_kind) or [None])
        return sample_difference.metrics(f"/{name}")

    @cached_property
    def model_layer_kinds(self) -> tuple[str, ...]:
        """Kinds of layers of all pipeline stages that can be computed in float64. The first access is a collective."""
        stages: list[tuple[str, ...]] = [()] * self.rank_info.layout.pp
        dist.all_gather_object(stages, float64_layers.kinds(self.model), group=self.rank_info.pp_group)
        return tuple(name for name in FLOAT64_LAYERS if any(name in kinds for kinds in stages))

    def _policy_scores(self, micros: Sequence[MicroBatch]) -> list[Metric]:
        """Fill the log-probabilities of each policy of this rank (old, reference, teacher) that the algorithm needs.

        Return the durations as metrics.
        """
        metrics: list[Metric] = []
        if self.spec.needs_old_logprobs:
            with self.routing.in_old_pass(micros):
                metrics.append(self._fill_scores("log_probs", "old_logprobs", micros))
        if self.reference is not None:
            with self.swap_weights(self.reference), self.routing.in_reference_pass(micros):
                metrics.append(self._fill_scores("ref_log_probs", "ref_logprobs", micros))
        if self.teacher is not None:
            with self.swap_weights(self.teacher):
                metrics.append(self._fill_scores("teacher_log_probs", "teacher_logprobs", micros))
        return metrics

    def _fill_scores(self, name: str, column: str, micros: Sequence[MicroBatch]) -> Metric:
        """Score trained tokens with the model's current weights and set field ``column`` of the micro-batches on the last stage.

        Return the duration as a metric.
        """
        start = time.perf_counter()
        for micro, values in self._columns(micros, self._scores(micros)):
            setattr(micro, column, values)
        return Last(f"perf/{name}_time", time.perf_counter() - start)

    def _scores(self, micros: Sequence[MicroBatch], float64_kind: str | None = None) -> list[Tensor]:
        """Return log-probabilities F32 [T] per micro-batch, 0 at untrained tokens; [] except on the last stage.

        Layers of kind ``float64_kind`` run in float64.
        """
        masks = [micro.batch.loss_weight > 0 for micro in micros]
        with float64_layers.float64_layers(self.model, float64_kind):
            return score_micros(self.wrapped, micros, masks, self.logprob_settings)

    def _assign_advantages(self, micros: Sequence[MicroBatch]) -> list[Metric]:
        if not self.rank_info.is_last:
            return []
        for micro, column in self._columns(micros, self._advantages(micros)):
            micro.advantages = column
        if not isinstance(self.token_advantage, Diagnostics):
            return []
        views = [self._view(micro) for micro in micros]
        diagnostics = diagnose(self.spec.algo, self.token_advantage, views, GroupSum(self.rank_info.dp_group))
        return [Mean(f"train/{name}", value) for name, value in diagnostics.items()]

    @staticmethod
    def _columns(
        micros: Sequence[MicroBatch], columns: Sequence[Tensor | None]
    ) -> Iterator[tuple[MicroBatch, Tensor | None]]:
        """Return an iterator over (micro-batch, column) pairs. It is empty on stages before the last: they have no columns."""
        return zip(micros, columns, strict=True) if columns else iter(())

    def _advantages(self, micros: Sequence[MicroBatch]) -> Sequence[Tensor | None]:
        """Return F32 [T] per micro-batch: token advantages, or at each token the group advantage of its sequence.

        An entry is None if the algorithm has neither.
        """
        if self.token_advantage is not None:
            views = [self._view(micro) for micro in micros]
            return token_advantages(self.spec.algo, self.token_advantage, views, GroupSum(self.rank_info.dp_group))
        out: list[Tensor | None] = []
        for micro in micros:
            batch = micro.batch
            advantages_T = None if batch.advantages is None else np.repeat(batch.advantages, np.diff(batch.cu_seqlens))
            out.append(None if advantages_T is None else to_device(advantages_T, self.rank_info.device))
        return out

    def _view(self, micro: MicroBatch) -> TokenView:
        batch, device = micro.batch, self.rank_info.device
        return TokenView(
            cu_seqlens=to_device(batch.cu_seqlens, device),
            loss_weight=to_device(batch.loss_weight, device),
            rewards=to_device(batch.rewards, device),
            advantages=None if batch.advantages is None else to_device(batch.advantages, device),
            rollout_logprobs=to_device(batch.rollout_logprobs, device),
            old_logprobs=micro.old_logprobs,
            ref_logprobs=micro.ref_logprobs,
            teacher_logprobs=micro.teacher_logprobs,
            values=micro.values,
        )

    # ---- scores and weights for the engines ------------------------------------------------------------------------
    @install.phase("score")
    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32 | None:
        """Return log-probabilities [T] at the sampling temperature, 0 at first tokens of sequences; None except on the reporter.

        Layers of kind ``float64_kind`` run in float64. Raises ``DataError`` as ``lay_out`` does.
        """
        micro = self.lay_out(batch)
        mask = np.ones(len(batch.token_ids), dtype=np.bool_)
        replay = self.routing.replay([micro], compare=float64_kind is None)
        with replay, float64_layers.float64_layers(self.model, float64_kind):
            scores = score_micros(self.wrapped, [micro], [mask], self.logprob_settings)
        return scores[0].cpu().numpy() if self.rank_info.is_reporter else None

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers on this rank that ``score`` can compute in float64."""
        return float64_layers.kinds(self.model)

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that the layers of this rank have used, sorted and without duplicates."""
        layers = self.model.modules()
        return tuple(sorted({layer.kernels() for layer in layers if isinstance(layer, MultiKernelLayer)}))

    @install.phase("export")
    def export_hf(self, folder: Path) -> None:
        """Write an HF folder that transformers and SGLang load. Raises ``CheckpointError`` as ``write_hf`` does."""
        write_hf(self.hf_export, self.folder, folder, self.rank_info)
