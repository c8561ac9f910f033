"""The megatron side of one rank: model, optimizer, reference, and what a rollout's training does with them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.batch import Rows
from slime_like.config.names import LOSSES, TOKEN_ADVANTAGES
from slime_like.config.resolved import ActorSpec
from slime_like.errors import DataError
from slime_like.interfaces import LossFn, TokenAdvantage, TokenView
from slime_like.metrics.types import Last, Metric
from slime_like.registry import resolve
from slime_like.train.megatron import checkpoint, host, optim
from slime_like.train.megatron.export import HFExport, write_hf
from slime_like.train.megatron.forward import Micro, Scoring, make_micro, score_micros, to_device
from slime_like.train.megatron.groups import Place
from slime_like.train.megatron.hf import HFFolder
from slime_like.train.megatron.model import Policy, load_hf, named_weights
from slime_like.train.megatron.step import OptimizerStep
from slime_like.train.megatron.transformer_config import choose_family, transformer_config
from slime_like.types import F32


class GroupSum:
    """``Reduce`` over the ranks that hold parts of the batch."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        """Element-wise sum; ``value`` is left as it is."""
        out = value.clone()
        dist.all_reduce(out, group=self._group)
        return out


class RankTrainer:
    """One rank's model and optimizer. Methods are collectives: every rank calls them in the same order."""

    def __init__(self, spec: ActorSpec, place: Place) -> None:
        self.spec = spec
        self.place = place
        self.folder = HFFolder(spec.model.hf_checkpoint)
        self.family = choose_family(spec, self.folder.config())
        self.table = self.family.weights()
        self.model = Policy(transformer_config(spec, self.family), self.family, place).to(place.device)
        load_hf(self.model, self.table, self.folder, place)
        self.reference = self._load_reference() if spec.needs_reference else None
        self.wrapped = optim.wrap(spec, self.model)
        self.optimizer = optim.make_optimizer(spec, self.wrapped)
        self.schedule = optim.make_schedule(spec, self.optimizer)
        host.verify()
        loss: LossFn = resolve("algo.loss", spec.algo.loss, LOSSES)(spec.algo)
        self.scoring = Scoring(spec.temperature, spec.model.logits_chunk)
        self.optimizer_step = OptimizerStep(self.wrapped, self.optimizer, self.schedule, loss, self.scoring, place)
        self.token_advantage: TokenAdvantage | None = None
        if spec.algo.token_advantage is not None:
            name = spec.algo.token_advantage
            self.token_advantage = resolve("algo.token_advantage", name, TOKEN_ADVANTAGES)(spec.algo)

    # ---- training ------------------------------------------------------------------------------------------------
    def train(self, steps: Sequence[Sequence[Rows]], num_tokens: Sequence[int], version: int) -> tuple[Metric, ...]:
        """Annotate all rows of a rollout, then take every optimizer step. Global metrics on the reporter, else ()."""
        if not steps:  # filters left nothing to train on
            return ()
        start = time.perf_counter()
        plan = [[self._micro(rows) for rows in step] for step in steps]
        metrics: list[Metric] = self.annotate([micro for step in plan for micro in step])
        for k, (micros, count) in enumerate(zip(plan, num_tokens, strict=True)):
            metrics += self.optimizer_step(micros, count, version if k == 0 else None)
        metrics += [
            Last("train/num_tokens", float(sum(num_tokens))),
            Last("perf/actor_train_time", time.perf_counter() - start),
        ]
        return tuple(metrics) if self.place.is_reporter else ()

    def _micro(self, rows: Rows) -> Micro:
        size = int(self.family.hf.vocab_size)
        if len(rows.token_ids) and not 0 <= rows.token_ids.min() <= rows.token_ids.max() < size:
            bad = rows.token_ids[(rows.token_ids < 0) | (rows.token_ids >= size)][0]
            raise DataError(
                f"token id {bad} is outside the vocabulary of {size} that {self.folder.path / 'config.json'} states: "
                "tokenizer and model do not belong together"
            )
        return make_micro(rows, self.place)

    def annotate(self, micros: Sequence[Micro]) -> list[Metric]:
        """Fill old and reference log-probabilities and advantages, each only where the algorithm reads it."""
        masks = [micro.rows.loss_weight > 0 for micro in micros]
        metrics: list[Metric] = []
        if self.spec.needs_old_logprobs:
            start = time.perf_counter()
            for micro, column in self._columns(micros, score_micros(self.wrapped, micros, masks, self.scoring)):
                micro.old_logprobs = column
            metrics.append(Last("perf/log_probs_time", time.perf_counter() - start))
        if self.spec.needs_reference:
            start = time.perf_counter()
            with self.as_reference():
                scores = score_micros(self.wrapped, micros, masks, self.scoring)
            for micro, column in self._columns(micros, scores):
                micro.ref_logprobs = column
            metrics.append(Last("perf/ref_log_probs_time", time.perf_counter() - start))
        if self.place.is_last:
            for micro, column in self._columns(micros, self._advantages(micros)):
                micro.advantages = column
        return metrics

    @staticmethod
    def _columns(micros: Sequence[Micro], columns: Sequence[Tensor | None]) -> Iterator[tuple[Micro, Tensor | None]]:
        """Pair micro-batches with their columns; off the last stage there are none."""
        return zip(micros, columns, strict=True) if columns else iter(())

    def _advantages(self, micros: Sequence[Micro]) -> Sequence[Tensor | None]:
        """F32 [T] per micro-batch: group advantages spread over their sequences, or token advantages."""
        if self.token_advantage is not None:
            views = [self._view(micro) for micro in micros]
            return self.token_advantage(views, GroupSum(self.place.dp_group))
        out: list[Tensor | None] = []
        for micro in micros:
            rows = micro.rows
            spread = None if rows.advantages is None else np.repeat(rows.advantages, np.diff(rows.cu_seqlens))
            out.append(None if spread is None else to_device(spread, self.place.device))
        return out

    def _view(self, micro: Micro) -> TokenView:
        rows, device = micro.rows, self.place.device
        return TokenView(
            cu_seqlens=to_device(rows.cu_seqlens, device),
            loss_weight=to_device(rows.loss_weight, device),
            rewards=to_device(rows.rewards, device),
            advantages=None if rows.advantages is None else to_device(rows.advantages, device),
            rollout_logprobs=to_device(rows.rollout_logprobs, device),
            old_logprobs=micro.old_logprobs,
            ref_logprobs=micro.ref_logprobs,
        )

    def score(self, rows: Rows) -> F32 | None:
        """[T] log-probabilities of every token but first ones, on the reporter."""
        micro = self._micro(rows)
        mask = np.ones(len(rows.token_ids), dtype=np.bool_)
        scores = score_micros(self.wrapped, [micro], [mask], self.scoring)
        return scores[0].cpu().numpy() if self.place.is_reporter else None

    # ---- reference -----------------------------------------------------------------------------------------------
    def _load_reference(self) -> dict[str, Tensor]:
        """This rank's shards of the reference, on the host."""
        spec = self.spec
        if spec.model.ref_checkpoint not in (None, spec.model.hf_checkpoint):
            assert spec.model.ref_checkpoint is not None
            load_hf(self.model, self.table, HFFolder(spec.model.ref_checkpoint, "model.ref_checkpoint"), self.place)
            reference = self._host_copy()
            load_hf(self.model, self.table, self.folder, self.place)
            return reference
        return self._host_copy()

    def _host_copy(self) -> dict[str, Tensor]:
        return {key: parameter.detach().cpu().clone() for key, parameter in named_weights(self.model)}

    @contextmanager
    def as_reference(self) -> Generator[None]:
        """The reference's weights in the model, the policy's on the host; exact on the way back."""
        assert self.reference is not None, "this algorithm uses no reference"
        policy = self._host_copy()
        self._fill(self.reference)
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
        """The live weights in HF names."""
        return HFExport(self.model, self.family, self.place)

    def export_hf(self, folder: Path) -> None:
        """Write the live weights as an HF folder."""
        write_hf(self.export(), self.folder, folder, self.place)

    def checkpoint_parts(self) -> checkpoint.Parts:
        """What a checkpoint holds."""
        return checkpoint.Parts(self.model, self.optimizer, self.schedule, self.family, self.place)
