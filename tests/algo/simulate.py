"""Miniature trainer: all ranks, micro-batches and reductions of one rollout, in float64 with one thread per rank."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.algo.loss import PackedSequences
from slime_like.algo_interfaces import LossFn, LossView, Reduce, TokenAdvantage, TokenView
from slime_like.batch import PackedBatch, TrainBatch
from slime_like.config.schema.names import LOSSES, TOKEN_ADVANTAGES
from slime_like.config.schema.policy import AlgoConfig
from slime_like.registry import resolve
from slime_like.train.megatron.model.layout import token_layout
from slime_like.types import I32
from slime_like.util.deadline import scale
from tests.algo.samples import VOCAB

WIDTH = 4


@dataclass(frozen=True)
class Policy:
    """Policy whose logits depend on the mean embedding of earlier tokens, so that a leak between sequences shows."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [D, V]

    @classmethod
    @functools.cache
    def random(cls, seed: int) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        embedding = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
        head = torch.randn(WIDTH, VOCAB, generator=generator, dtype=torch.float64)
        return cls(embedding.requires_grad_(), head.requires_grad_())

    def logits(self, token_ids: Tensor) -> Tensor:
        """Return logits [..., L - 1, V] of sequences [..., L]; row t predicts token t + 1 of the same sequence."""
        count = torch.arange(1, token_ids.shape[-1], dtype=torch.float64)[:, None]
        hidden = self.embedding[token_ids[..., :-1]].cumsum(-2) / count
        return hidden.tanh() @ self.head

    def score(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [..., L] and entropies [..., L] of sequences [..., L], 0 at the first tokens."""
        table = self.logits(token_ids).log_softmax(-1)
        token_logprobs = table.gather(-1, token_ids[..., 1:, None]).squeeze(-1)
        entropy = -(table.exp() * table).sum(-1)
        return torch.nn.functional.pad(token_logprobs, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


@dataclass(frozen=True)
class Policies:
    """Policies of a step. ``old`` is None if a single optimizer step follows the rollout."""

    actor: Policy
    ref: Policy
    old: Policy | None


@dataclass(frozen=True)
class SimulatedStep:
    """Loss, gradient and metrics of one optimizer step, summed over ranks and micro-batches."""

    loss: float
    gradient: Tensor
    means: dict[str, float]


class ThreadReduce:
    """``Reduce`` over threads, one per rank."""

    def __init__(self, size: int) -> None:
        self._values: list[Tensor] = [torch.zeros(()) for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=60 * scale())

    def rank(self, index: int) -> Reduce:
        outer = self

        class _Rank:
            def sum(self, value: Tensor) -> Tensor:
                outer._values[index] = value
                outer._barrier.wait()
                total = torch.stack(outer._values).sum(0)
                outer._barrier.wait()
                return total

        return _Rank()


class _ThreadSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, exchange: Reduce) -> Tensor:
        ctx.exchange = exchange
        return exchange.sum(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.sum(gradients[0]), None


@dataclass(frozen=True)
class DifferentiableThreadSum:
    """Sum over threads with a gradient that is summed over them too."""

    exchange: Reduce

    def sum(self, value: Tensor) -> Tensor:
        total: Any = _ThreadSum.apply(value, self.exchange)
        return total


@dataclass(frozen=True)
class ForwardOnlySum:
    """Planted fault: the gradient is not summed over ranks."""

    exchange: Reduce

    def sum(self, value: Tensor) -> Tensor:
        return value + (self.exchange.sum(value.detach()) - value.detach())


class LocalReduce:
    """Planted fault, or a single rank: the sum covers only local values."""

    def sum(self, value: Tensor) -> Tensor:
        return value


SequenceReduce = Callable[[Reduce], Reduce]


def simulate(
    batch: TrainBatch,
    config: AlgoConfig,
    policies: Policies,
    *,
    cp: int = 1,
    local_reduce: bool = False,
    sequence_reduce: SequenceReduce = DifferentiableThreadSum,
) -> list[SimulatedStep]:
    """Return loss and gradient of each optimizer step at the same weights, with rows split over ``cp`` ranks."""
    loss_fn: LossFn = resolve("algo.loss", config.loss, LOSSES)(config)
    dp = len(batch.steps[0].micro_batches)
    advantages = _token_advantages(batch, config, policies, dp, local_reduce)
    results: list[SimulatedStep] = []
    with ThreadPoolExecutor(cp) as threads:
        for s, step in enumerate(batch.steps):
            micro_batches = [
                (row, advantages.get((s, d, m)))
                for d, rank in enumerate(step.micro_batches)
                for m, row in enumerate(rank)
            ]
            cp_reduce = ThreadReduce(cp)
            ranks = [(cp_reduce.rank(r) if cp > 1 else LocalReduce(), r) for r in range(cp)]
            parts = threads.map(
                lambda rank: _step(micro_batches, loss_fn, policies, sequence_reduce(rank[0]), (cp, rank[1])),  # noqa: B023
                ranks,
            )
            results.append(_total(list(parts)))
    return results


@dataclass(frozen=True)
class _Part:
    """Contribution of one context parallel rank to a step."""

    loss: float
    weight: float
    gradient: Tensor
    sums: dict[str, float]


def _total(parts: Sequence[_Part]) -> SimulatedStep:
    weight = sum(part.weight for part in parts)
    means = {name: sum(part.sums[name] for part in parts) / weight for name in parts[0].sums}
    return SimulatedStep(sum(p.loss for p in parts), torch.stack([p.gradient for p in parts]).sum(0), means)


def _step(
    micro_batches: Sequence[tuple[PackedBatch, Tensor | None]],
    loss_fn: LossFn,
    policies: Policies,
    reduce: Reduce,
    cp_and_rank: tuple[int, int],
) -> _Part:
    parameters = [policies.actor.embedding, policies.actor.head]
    gradient = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    loss_sum, weight_sum, sums = 0.0, 0.0, dict[str, float]()
    for row, token_advantages in micro_batches:
        view = loss_view(row, token_advantages, policies, reduce, cp_and_rank, entropy=loss_fn.needs_entropy)
        output = loss_fn(view)
        loss = (output.loss * view.loss_weight).sum()
        gradient += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        loss_sum += float(loss.detach())
        weight_sum += float(view.loss_weight.sum())
        for name, value in output.means.items():
            sums[name] = sums.get(name, 0.0) + float((value * view.loss_weight).sum())
    return _Part(loss_sum, weight_sum, gradient, sums)


def loss_view(
    row: PackedBatch,
    token_advantages: Tensor | None,
    policies: Policies,
    reduce: Reduce,
    cp_and_rank: tuple[int, int],
    *,
    entropy: bool,
) -> LossView:
    """Return the trained tokens of a row in the chunks of rank ``cp_and_rank[1]`` of ``cp_and_rank[0]`` ranks."""
    cp, rank = cp_and_rank
    layout = token_layout(row.cu_seqlens, cp=cp, cp_rank=rank)
    is_trained = row.loss_weight > 0
    positions = layout.predictions(is_trained).target
    index = torch.tensor(positions)
    logprobs, entropies = score_sequences(policies.actor, row.token_ids, row.cu_seqlens)
    weight = torch.tensor(row.loss_weight, dtype=torch.float64)[index]
    group_T = None if row.advantages is None else spread(row, torch.tensor(row.advantages, dtype=torch.float64))
    advantages = group_T if token_advantages is None else token_advantages
    return LossView(
        logprobs=logprobs[index],
        entropy=entropies[index] if entropy else None,
        loss_weight=weight,
        advantages=None if advantages is None else advantages[index],
        old_logprobs=None if policies.old is None else constant_logprobs(policies.old, row)[index],
        rollout_logprobs=torch.tensor(row.rollout_logprobs, dtype=torch.float64)[index],
        ref_logprobs=constant_logprobs(policies.ref, row)[index],
        sequences=PackedSequences(
            index_N=torch.tensor(layout.sequence_of(positions)),
            num_trained_S=torch.tensor(layout.segment_sum(is_trained.astype(np.float64), np.arange(len(is_trained)))),
            reduce=reduce,
        ),
    )


def _token_advantages(
    batch: TrainBatch, config: AlgoConfig, policies: Policies, dp: int, local_reduce: bool
) -> dict[tuple[int, int, int], Tensor]:
    if config.token_advantage is None:
        return {}
    estimator: TokenAdvantage = resolve("algo.token_advantage", config.token_advantage, TOKEN_ADVANTAGES)(config)
    reduce = ThreadReduce(dp)

    def rank(d: int) -> dict[tuple[int, int, int], Tensor]:
        indices = [(s, d, m) for s, step in enumerate(batch.steps) for m in range(len(step.micro_batches[d]))]
        views = [token_view(batch.steps[s].micro_batches[d][m], policies) for s, d, m in indices]
        values = estimator(views, LocalReduce() if local_reduce else reduce.rank(d))
        return dict(zip(indices, values, strict=True))

    with ThreadPoolExecutor(dp) as threads:
        parts = list(threads.map(rank, range(dp)))
    return {index: value for part in parts for index, value in part.items()}


def token_view(row: PackedBatch, policies: Policies) -> TokenView:
    """Return the view of a row that a token advantage gets, in float64."""
    old = policies.old or policies.actor
    return TokenView(
        cu_seqlens=torch.tensor(row.cu_seqlens),
        loss_weight=torch.tensor(row.loss_weight, dtype=torch.float64),
        rewards=torch.tensor(row.rewards, dtype=torch.float64),
        advantages=None if row.advantages is None else torch.tensor(row.advantages, dtype=torch.float64),
        rollout_logprobs=torch.tensor(row.rollout_logprobs, dtype=torch.float64),
        old_logprobs=constant_logprobs(old, row),
        ref_logprobs=constant_logprobs(policies.ref, row),
    )


def score_sequences(policy: Policy, token_ids_T: I32, cu_seqlens: I32) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] and entropies [T] of packed sequences."""
    lengths = torch.tensor(cu_seqlens).diff()
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]  # [S, longest]
    token_ids = torch.zeros(is_token.shape, dtype=torch.int64)
    token_ids[is_token] = torch.tensor(token_ids_T, dtype=torch.int64)
    logprobs, entropies = policy.score(token_ids)
    return logprobs[is_token], entropies[is_token]


def constant_logprobs(policy: Policy, row: PackedBatch) -> Tensor:
    """Return log-probabilities [T] of a packed row without a gradient."""
    return _constant_logprobs(policy, row.token_ids.tobytes(), row.cu_seqlens.tobytes())


@functools.lru_cache(1_000)
def _constant_logprobs(policy: Policy, token_ids: bytes, cu_seqlens: bytes) -> Tensor:
    """Return log-probabilities [T] of a packed row, cached for all context parallel ranks; bytes are hashable."""
    with torch.no_grad():
        return score_sequences(policy, np.frombuffer(token_ids, np.int32), np.frombuffer(cu_seqlens, np.int32))[0]


def spread(row: PackedBatch, values_S: Tensor) -> Tensor:
    """Repeat values per sequence [S] to one per token [T]."""
    return values_S.repeat_interleave(torch.tensor(row.cu_seqlens).diff().long())
