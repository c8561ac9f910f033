"""Context parallelism by heads: while the rule runs, each rank holds all tokens for its share of the heads.

As in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509) and megatron-core's GatedDeltaNet, an all-to-all exchanges tokens
for heads, and another one reverses it. The output gate is not exchanged, because the rule does not read it; megatron
exchanges it too, which makes the first exchange larger by half in Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from torch import Tensor

from slime_like.train.megatron.model.layers import PackedRows
from slime_like_plugins.qwen_gdn.backend import GDNBackend
from slime_like_plugins.qwen_gdn.mixing import DeltaInputs, MixingHeads, delta_rule


class HeadExchange:
    """``Mixing`` that splits the heads over the ranks of ``group``, whose size must divide the head counts.

    A call is a collective over ``group``, except in a group of one rank.
    """

    def __init__(self, backend: GDNBackend, heads: MixingHeads, group: Any, hidden: int = 0) -> None:
        del hidden  # read by ``StatePassing`` only
        self.backend = backend
        self.group = group
        self.size: int = group.size()
        self.rank: int = group.rank()
        assert heads.keys % self.size == heads.values % self.size == 0, f"{heads} over {self.size} ranks"
        self.heads = heads.shared_by(self.size)
        self.channels = heads.channels

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """Return the output [L, HV, V] for this rank's L tokens and all of its heads."""
        cu_seqlens, cu_seqlens_cpu = packed.sequence_cu, packed.cu_seqlens_q
        assert cu_seqlens is not None and cu_seqlens_cpu is not None
        local_heads = self._to_heads(inputs, packed)
        out = delta_rule(self.backend, local_heads, self.heads, cu_seqlens, cu_seqlens_cpu)
        return self._to_tokens(out, packed)

    def enter(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Return ``hidden`` unchanged."""
        return hidden

    def leave(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Return ``hidden`` unchanged."""
        return hidden

    def _to_heads(self, inputs: DeltaInputs, packed: PackedRows) -> DeltaInputs:
        """Send all heads of this rank's tokens; return this rank's share of the heads of all P tokens, in sequence order.

        Collective.
        """
        if self.size == 1:
            return inputs
        assert packed.in_order is not None
        num_heads = inputs.beta.shape[1]
        sections = (*inputs.qkv.split(self.channels, -1), inputs.beta, inputs.alpha)
        by_share = [s.unflatten(-1, (self.size, -1)).transpose(0, 1) for s in sections]  # [size, L, width / size] each
        sent_rows = torch.cat(by_share, -1)
        received_rows: Tensor = all_to_all(self.group, sent_rows).flatten(0, 1)[packed.in_order]
        widths = (sum(self.channels) // self.size, num_heads // self.size, num_heads // self.size)
        qkv, beta, alpha = received_rows.split(widths, -1)
        return DeltaInputs(
            qkv,
            beta,
            alpha,
            self._share(inputs.conv_weight, self.channels),
            self._share(inputs.A_log, (num_heads,)),
            self._share(inputs.dt_bias, (num_heads,)),
        )

    def _share(self, parameter: Tensor, sections: Sequence[int]) -> Tensor:
        """Return this rank's rows of each section of ``parameter``.

        This rank's gradient of the other rows is 0; the data parallel gradient reduction sums the gradients of all ranks.
        """
        return torch.cat([s.chunk(self.size)[self.rank] for s in parameter.split(list(sections))])

    def _to_tokens(self, out: Tensor, packed: PackedRows) -> Tensor:
        """Turn [P, HV / size, V], all tokens with a share of the heads, into [L, HV, V]. Collective.

        The result contains this rank's tokens with all heads.
        """
        if self.size == 1:
            return out
        assert packed.by_rank is not None
        sent_rows = out.flatten(1)[packed.by_rank].unflatten(0, (self.size, -1))
        received_rows: Tensor = all_to_all(
            self.group, sent_rows
        )  # [size, L, HV / size * V], the heads of one rank after another
        return received_rows.transpose(0, 1).reshape(received_rows.shape[1], -1, self.heads.value_dim)
