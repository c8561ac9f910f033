"""A trainer in miniature: every rank, micro-batch and reduction of one rollout, in float64 on one CPU thread per rank."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algo.token_advantage import ReinforcePlusPlus
from slime_like.batch import Rows, TrainBatch
from slime_like.config.algo import AlgoConfig, ReinforcePlusPlusConfig
from slime_like.config.names import LOSSES
from slime_like.interfaces import LossFn, LossView, Reduce, TokenView
from slime_like.registry import resolve
from tests.algo.samples import VOCAB

WIDTH = 4


@dataclass(frozen=True)
class Policy:
    """Logits of the next token from the mean embedding of all before it: any leak between sequences changes them."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [D, V]

    @classmethod
    def random(cls, seed: int) -> Policy:
        generator = torch.Generator().manual_seed(seed)
        embedding = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
        head = torch.randn(WIDTH, VOCAB, generator=generator, dtype=torch.float64)
        return cls(embedding.requires_grad_(), head.requires_grad_())

    def logits(self, token_ids: Tensor) -> Tensor:
        """[L] -> [L - 1, V]: row t predicts token t + 1."""
        count = torch.arange(1, len(token_ids), dtype=torch.float64)[:, None]
        hidden = self.embedding[token_ids[:-1]].cumsum(0) / count
        return hidden.tanh() @ self.head

    def score(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[L] log-probabilities and entropies, 0 at the first token."""
        table = self.logits(token_ids).log_softmax(-1)
        picked = table.gather(1, token_ids[1:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        zero = torch.zeros(1, dtype=torch.float64)
        return torch.cat([zero, picked]), torch.cat([zero, entropy])


@dataclass(frozen=True)
class Policies:
    """The three policies of a step; ``old=None``: one optimizer step follows the rollout."""

    actor: Policy
    ref: Policy
    old: Policy | None


@dataclass(frozen=True)
class Result:
    """Loss, gradient and metrics of one optimizer step, summed over ranks and micro-batches."""

    loss: float
    gradient: Tensor
    means: dict[str, float]


class ThreadReduce:
    """``Reduce`` over threads that each play a rank."""

    def __init__(self, size: int) -> None:
        self._values: list[Tensor] = [torch.zeros(()) for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=60)

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


class LocalReduce:
    """The planted fault: a rank that sums only what it holds."""

    def sum(self, value: Tensor) -> Tensor:
        return value


def simulate(batch: TrainBatch, config: AlgoConfig, policies: Policies, *, local_reduce: bool = False) -> list[Result]:
    """Loss and gradient of each optimizer step at the same weights."""
    loss_fn: LossFn = resolve("algo.loss", config.loss, LOSSES)(config)
    dp = len(batch.steps[0].rows)
    advantages = _token_advantages(batch, config, policies, dp, local_reduce)
    results: list[Result] = []
    for s, step in enumerate(batch.steps):
        rows = [(row, advantages.get((s, d, m))) for d, rank in enumerate(step.rows) for m, row in enumerate(rank)]
        results.append(_step(rows, loss_fn, policies))
    return results


def _step(rows: Sequence[tuple[Rows, Tensor | None]], loss_fn: LossFn, policies: Policies) -> Result:
    parameters = [policies.actor.embedding, policies.actor.head]
    gradient = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    loss_sum, weight_sum, means = 0.0, 0.0, dict[str, float]()
    for row, token_advantages in rows:
        logprobs, entropy = score_rows(policies.actor, row)
        group_T = None if row.advantages is None else spread(row, torch.tensor(row.advantages, dtype=torch.float64))
        weight = torch.tensor(row.loss_weight, dtype=torch.float64)
        view = LossView(
            logprobs=logprobs,
            entropy=entropy if loss_fn.needs_entropy else None,
            loss_weight=weight,
            advantages=group_T if token_advantages is None else token_advantages,
            old_logprobs=None if policies.old is None else score_rows(policies.old, row)[0].detach(),
            rollout_logprobs=torch.tensor(row.rollout_logprobs, dtype=torch.float64),
            ref_logprobs=score_rows(policies.ref, row)[0].detach(),
        )
        output = loss_fn(view)
        loss = (output.loss * weight).sum()
        gradient += torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        loss_sum += float(loss.detach())
        weight_sum += float(weight.sum())
        for name, value in output.means.items():
            means[name] = means.get(name, 0.0) + float((value * weight).sum())
    return Result(loss_sum, gradient, {name: value / weight_sum for name, value in means.items()})


def _token_advantages(
    batch: TrainBatch, config: AlgoConfig, policies: Policies, dp: int, local_reduce: bool
) -> dict[tuple[int, int, int], Tensor]:
    if not isinstance(config, ReinforcePlusPlusConfig):
        return {}
    estimator = ReinforcePlusPlus(config)
    reduce = ThreadReduce(dp)

    def rank(d: int) -> dict[tuple[int, int, int], Tensor]:
        places = [(s, d, m) for s, step in enumerate(batch.steps) for m in range(len(step.rows[d]))]
        views = [token_view(batch.steps[s].rows[d][m], policies) for s, d, m in places]
        found = estimator(views, LocalReduce() if local_reduce else reduce.rank(d))
        return dict(zip(places, found, strict=True))

    with ThreadPoolExecutor(dp) as threads:
        parts = list(threads.map(rank, range(dp)))
    return {place: value for part in parts for place, value in part.items()}


def token_view(row: Rows, policies: Policies) -> TokenView:
    """What a token advantage sees of a row, in float64."""
    old = policies.old or policies.actor
    return TokenView(
        cu_seqlens=torch.tensor(row.cu_seqlens),
        loss_weight=torch.tensor(row.loss_weight, dtype=torch.float64),
        rewards=torch.tensor(row.rewards, dtype=torch.float64),
        advantages=None,
        rollout_logprobs=torch.tensor(row.rollout_logprobs, dtype=torch.float64),
        old_logprobs=score_rows(old, row)[0].detach(),
        ref_logprobs=score_rows(policies.ref, row)[0].detach(),
    )


def score_rows(policy: Policy, row: Rows) -> tuple[Tensor, Tensor]:
    """[T] log-probabilities and entropies of a packed row, sequence by sequence."""
    edges = row.cu_seqlens.tolist()
    tokens = torch.tensor(row.token_ids, dtype=torch.int64)
    parts = [policy.score(tokens[a:b]) for a, b in itertools.pairwise(edges)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def spread(row: Rows, values_S: Tensor) -> Tensor:
    """[S] -> [T]."""
    return values_S.repeat_interleave(torch.tensor(row.cu_seqlens).diff().long())
