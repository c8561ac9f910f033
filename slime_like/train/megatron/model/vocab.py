"""Log-probability and entropy from hidden states, with logits computed in chunks and never stored.

Forward saves the hidden states and, per token, a log-sum-exp and, if requested, the entropy. Backward recomputes the logits of
each chunk, which costs one more matrix multiplication per chunk. The memory for logits is a few float32 buffers
[chunk, this rank's tokens of the vocabulary].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.util import batch_invariant


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """A rank's rows of the padded vocabulary, from row ``start``. The first ``num_real`` rows are tokens, the rest padding."""

    start: int
    num_real: int
    group: Any  # tensor parallel group


VocabScores = Callable[..., tuple[Tensor, Tensor | None]]
"""``vocab_scores``, or a function that computes the same with other kernels (the plugins' ``megatron_cpu/scores.py``)."""


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        target_N: Tensor,
        part: VocabularyPart,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        if _size(part) == 1 and part.num_real:
            return _full_vocabulary(ctx, hidden_NH, weight_VH, target_N, part, temperature, chunk, entropy)
        n = len(hidden_NH)
        stats_N3 = hidden_NH.new_zeros((n, 3), dtype=torch.float32)
        max_N = hidden_NH.new_full((n,), float("-inf"), dtype=torch.float32)
        for rows in _chunks(n, chunk):
            logits = _logits(hidden_NH[rows], weight_VH, part, temperature)
            local, inside = _local_target(target_N[rows], part)
            row_max = logits.amax(-1) if part.num_real else max_N[rows].clone()
            _all_reduce(row_max, part, dist.ReduceOp.MAX)
            logits.sub_(row_max[:, None])
            target_logits = (
                logits.gather(1, local[:, None])[:, 0] * inside if part.num_real else torch.zeros_like(row_max)
            )
            exp = logits.exp()
            total = exp.sum(-1)
            weighted = exp.mul_(logits).sum(-1) if entropy else torch.zeros_like(total)
            stats_N3[rows] = torch.stack((total, target_logits, weighted), -1)
            max_N[rows] = row_max
        _all_reduce(stats_N3, part, dist.ReduceOp.SUM)
        total_N, chosen_N, weighted_N = stats_N3.unbind(-1)
        logprob_N = chosen_N - total_N.log()
        entropy_N = total_N.log() - weighted_N / total_N if entropy else None
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, max_N + total_N.log(), entropy_N)
        ctx.part, ctx.temperature, ctx.chunk = part, temperature, chunk
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprob_N, grad_entropy_N = grads
        hidden_NH, weight_VH, target_N, lse_N, entropy_N = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=torch.float32, device=weight_VH.device)
        for rows in _chunks(len(hidden_NH), ctx.chunk):
            # d logprob / d logit_j = [j = target] - p_j ;  d entropy / d logit_j = -p_j (log p_j + entropy)
            grad = _logits(hidden_NH[rows], weight_VH, part, ctx.temperature).sub_(lse_N[rows, None])
            if grad_entropy_N is not None:
                p = grad.exp()
                grad.add_(entropy_N[rows, None]).mul_(grad_entropy_N[rows, None])
                if grad_logprob_N is not None:
                    grad.add_(grad_logprob_N[rows, None])
                grad.mul_(p).mul_(-1 / ctx.temperature)
            elif grad_logprob_N is not None:
                grad.exp_().mul_((grad_logprob_N[rows] * (-1 / ctx.temperature))[:, None])
            if part.num_real and grad_logprob_N is not None:
                local, inside = _local_target(target_N[rows], part)
                grad.scatter_add_(1, local[:, None], (grad_logprob_N[rows] * inside / ctx.temperature)[:, None])
            grad = grad.to(hidden_NH.dtype)
            grad_hidden_NH[rows] = grad @ weight_VH[: part.num_real]
            grad_weight_VH[: part.num_real] += grad.T @ hidden_NH[rows]
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


def _full_vocabulary(
    ctx: Any,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    part: VocabularyPart,
    temperature: float,
    chunk: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Run forward on one rank with the full vocabulary, using the engine's formula so that results can agree bitwise."""
    n = len(hidden_NH)
    logprob_N, lse_N = (hidden_NH.new_empty(n, dtype=torch.float32) for _ in range(2))
    entropy_N = torch.empty_like(logprob_N) if entropy else None
    for rows in _chunks(n, chunk):
        logits = _logits(hidden_NH[rows], weight_VH, part, temperature)
        logprobs, target_index = torch.log_softmax(logits, -1), target_N[rows, None]
        logprob_N[rows] = logprobs.gather(1, target_index)[:, 0]
        lse_N[rows] = logits.gather(1, target_index)[:, 0] - logprob_N[rows]
        if entropy_N is not None:
            entropy_N[rows] = -(logits.copy_(logprobs).exp_().mul_(logprobs)).sum(-1)
    ctx.save_for_backward(hidden_NH, weight_VH, target_N, lse_N, entropy_N)
    ctx.part, ctx.temperature, ctx.chunk = part, temperature, chunk
    return logprob_N, entropy_N


def vocab_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    part: VocabularyPart,
    temperature: float,
    chunk: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities F32 [N] of ``target_N`` and, if ``entropy``, the entropies F32 [N], otherwise None.

    The distribution is ``softmax(hidden @ weight.T / temperature)`` over the vocabulary without padding rows;
    ``weight_VH`` is this rank's part of the weight. Results are equal on all ranks. The gradient of ``hidden_NH`` is
    this rank's share, which the caller's tensor parallel region sums. Token ids in ``target_N`` are global. Collective
    over the tensor parallel ranks.
    """
    return _Scores.apply(hidden_NH, weight_VH, target_N, part, temperature, chunk, entropy)  # pyright: ignore[reportReturnType]


def _logits(hidden_nH: Tensor, weight_VH: Tensor, part: VocabularyPart, temperature: float) -> Tensor:
    """Return float32 logits [n, num_real] over this rank's part of the vocabulary, divided by the temperature."""
    logits = batch_invariant.linear(hidden_nH, weight_VH[: part.num_real]).float()
    return logits.div_(temperature) if temperature != 1.0 else logits


def _local_target(target_n: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Return the local column of each target (0 for targets on other ranks), and a mask of the targets on this rank."""
    local = target_n - part.start
    inside = (local >= 0) & (local < part.num_real)
    return torch.where(inside, local, 0), inside


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _size(part: VocabularyPart) -> int:
    return 1 if part.group is None else int(part.group.size())


def _all_reduce(x: Tensor, part: VocabularyPart, op: Any) -> None:
    if _size(part) > 1:
        dist.all_reduce(x, op=op, group=part.group)
