"""Merge of attention over parts of a sequence by their log-sum-exps, and the exchange within a DCP group.

A part of the keys gives output ``o_r`` (softmax over that part) and ``lse_r``, the logarithm of the sum of exp(scores).
Over all parts: ``lse = logsumexp_r(lse_r)`` and ``o = sum_r exp(lse_r - lse) o_r``. A part without keys has ``lse_r = -inf``
and no effect. The method is that of Helix Parallelism (Bhatia et al., 2025, arXiv 2507.07120) and of SGLang's
``layers/dcp/comm.py``.

Axes: R parts, T tokens, H query heads of this rank, A query heads of all ranks of the group, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def merge(outs_RTHD: Tensor, lses_RTH: Tensor, *, base: float = math.e) -> tuple[Tensor, Tensor]:
    """Return output [T, H, D] and natural log-sum-exp [T, H] over all parts, in the dtype of ``lses_RTH``.

    ``base`` is the base of the logarithm in ``lses_RTH``: FlashInfer's and TensorRT-LLM's kernels return base 2. A token for
    which no part has a key gets 0 and -inf.
    """
    lses_RTH = lses_RTH * math.log(base) if base != math.e else lses_RTH
    lse_TH = torch.logsumexp(lses_RTH, 0)
    weights_RTH = torch.exp(lses_RTH - lse_TH.masked_fill(lse_TH == -math.inf, 0.0))
    return torch.einsum("rth,rthd->thd", weights_RTH, outs_RTHD.to(lses_RTH.dtype)), lse_TH


def all_reduce(out_TAD: Tensor, lse_TA: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Merge over the ranks of a DCP group (``ag_rs``): all-gather log-sum-exps, then all-reduce scaled outputs.

    Return this rank's heads: [T, H, D] and [T, H]. ``out_TAD`` is overwritten. Collective. Despite the name of the option
    (reduce-scatter), SGLang's function sends the outputs of all heads to every rank.
    """
    from sglang.srt.layers.dcp import cp_lse_ag_out_rs_mha

    out, lse = cp_lse_ag_out_rs_mha(out_TAD, lse_TA, group, return_lse=True)
    return out, lse


def all_to_all(out_TAD: Tensor, lse_TA: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Merge over the ranks of a DCP group (``a2a``): exchange outputs and log-sum-exps in one all-to-all, then merge.

    Return this rank's heads: [T, H, D] and [T, H]. Collective.
    """
    size = group.world_size
    packed = torch.cat((out_TAD, lse_TA[..., None]), -1)
    tokens, heads, width = packed.shape
    sent_parts = packed.view(tokens, size, heads // size, width).transpose(0, 1).contiguous()
    received_parts = torch.empty_like(sent_parts)
    group.all_to_all_single(received_parts, sent_parts)
    return merge(received_parts[..., :-1], received_parts[..., -1])


EXCHANGES: dict[str, Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]] = {
    "ag_rs": all_reduce,
    "a2a": all_to_all,
}
"""``rollout.dcp_comm`` -> merge over the ranks of a DCP group."""
