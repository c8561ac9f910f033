"""Log-probability and entropy from hidden states by the C kernels: one pass over a chunk's logits in forward, one in backward.

If a single chunk holds all tokens, its logits are saved for backward in the model's dtype. Otherwise backward recomputes the
logits, as ``slime_like.train.megatron.model.vocab`` does. That module also handles the cases that these kernels do not support.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_like.train.megatron.model.vocab import VocabularyPart, vocab_scores
from slime_like_plugins.megatron_cpu.kernels import SUFFIX, kernels


class ScoresFunction(torch.autograd.Function):
    """Log-probabilities F32 [N] and entropies F32 [N] or None.

    The inputs are hidden [N, H], weight [V, H], the number of its rows that are tokens, target I64 [N] and settings.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        real: int,
        target_N: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
        logits_nV = None
        for hidden_nH, target_n in zip(hidden_NH.split(chunk), target_N.split(chunk), strict=True):
            logits_nV = hidden_nH @ weight_VH[:real].T
            parts.append(kernels().log_probs(logits_nV, target_n, temperature, entropy=entropy))
        logprob_N, lse_N = torch.cat([columns[0] for columns in parts]), torch.cat([columns[1] for columns in parts])
        entropy_N = torch.cat([columns[2] for columns in parts if columns[2] is not None]) if entropy else None
        saved_logits = logits_nV if len(parts) == 1 else None
        ctx.save_for_backward(hidden_NH, weight_VH, target_N, lse_N, entropy_N, saved_logits)
        ctx.real, ctx.temperature, ctx.chunk = real, temperature, chunk
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_NH, weight_VH, target_N, lse_N, entropy_N, saved_logits = ctx.saved_tensors
        size: int = ctx.chunk
        grad_logprob_N = torch.zeros_like(lse_N) if grads[0] is None else grads[0].contiguous()
        grad_entropy_N = None if grads[1] is None else grads[1].contiguous()
        real_VH, grad_hidden_NH, shares = weight_VH[: ctx.real], torch.empty_like(hidden_NH), None
        for start in range(0, len(hidden_NH), size):
            rows = slice(start, start + size)
            pick = lambda column, rows=rows: None if column is None else column[rows]  # noqa: E731
            logits_nV = hidden_NH[rows] @ real_VH.T if saved_logits is None else saved_logits
            out_nV = logits_nV if saved_logits is None else torch.empty_like(saved_logits)
            scores, score_grads = (lse_N[rows], pick(entropy_N)), (grad_logprob_N[rows], pick(grad_entropy_N))
            kernels().log_probs_back(logits_nV, target_N[rows], scores, score_grads, ctx.temperature, out_nV)
            torch.mm(out_nV, real_VH, out=grad_hidden_NH[rows])
            share_VH = out_nV.T @ hidden_NH[rows]
            if saved_logits is None:  # sum several shares in float32
                share_VH = share_VH.float() if shares is None else shares.add_(share_VH)
            shares = share_VH
        assert shares is not None
        return grad_hidden_NH, _padded(shares.to(weight_VH.dtype), len(weight_VH)), *[None] * 5


def _padded(share_VH: Tensor, size: int) -> Tensor:
    """Return ``share_VH`` with zero rows appended up to ``size`` rows, for the vocabulary's padding."""
    return share_VH if len(share_VH) == size else torch.nn.functional.pad(share_VH, (0, 0, 0, size - len(share_VH)))


def fused_vocab_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    *,
    part: VocabularyPart,
    temperature: float,
    chunk: int,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the results of ``vocab_scores``.

    ``vocab_scores`` itself computes them if the vocabulary is split, the dtype is not supported, the weight has another
    dtype than the hidden states, or there are no tokens. Collective over the tensor parallel ranks, as ``vocab_scores`` is.
    """
    is_unshared = part.group is None or part.group.size() == 1
    fits = hidden_NH.dtype in SUFFIX and weight_VH.dtype is hidden_NH.dtype
    if not (is_unshared and part.num_real and len(hidden_NH) and fits):
        return vocab_scores(
            hidden_NH, weight_VH, target_N, part=part, temperature=temperature, chunk=chunk, entropy=entropy
        )
    out: Any = ScoresFunction.apply(hidden_NH, weight_VH, part.num_real, target_N, temperature, chunk, entropy)
    return out
