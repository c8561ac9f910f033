"""Context parallelism by heads: while the rule runs, each rank has all tokens of its share of the heads.

As DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509) and megatron-core's GatedDeltaNet do: one all-to-all turns a part
of the tokens into a part of the heads, another one back. What the rule does not read, the output gate, stays at home:
megatron sends it along, and so half as much again.
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


class HeadWise:
    """``Mixing`` for head counts that the ranks of ``group`` divide; of one rank it is the rule and nothing else."""

    def __init__(self, backend: GDNBackend, heads: MixingHeads, group: Any, hidden: int = 0) -> None:
        del hidden  # projections are of attention's tokens
        self.backend = backend
        self.group = group
        self.size: int = group.size()
        self.rank: int = group.rank()
        assert heads.keys % self.size == heads.values % self.size == 0, f"{heads} over {self.size} ranks"
        self.heads = heads.shared_by(self.size)
        self.channels = heads.channels

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """This rank's L tokens and all of its heads -> [L, HV, V]."""
        cu_seqlens, cu_seqlens_cpu = packed.sequence_cu, packed.cu_seqlens_q
        assert cu_seqlens is not None and cu_seqlens_cpu is not None
        local_heads = self._to_heads(inputs, packed)
        out = delta_rule(self.backend, local_heads, self.heads, cu_seqlens, cu_seqlens_cpu)
        return self._to_tokens(out, packed)

    def enter(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """See ``Mixing.enter``."""
        return hidden

    def leave(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """See ``Mixing.leave``."""
        return hidden

    def _to_heads(self, inputs: DeltaInputs, packed: PackedRows) -> DeltaInputs:
        """Some tokens and all heads -> all tokens, in the order of their sequences, and some heads."""
        if self.size == 1:
            return inputs
        assert packed.in_order is not None
        count = inputs.beta.shape[1]
        sections = (*inputs.qkv.split(self.channels, -1), inputs.beta, inputs.alpha)
        by_share = [s.unflatten(-1, (self.size, -1)).transpose(0, 1) for s in sections]  # [size, L, width / size] each
        sent = torch.cat(by_share, -1)
        received: Tensor = all_to_all(self.group, sent).flatten(0, 1)[packed.in_order]
        widths = (sum(self.channels) // self.size, count // self.size, count // self.size)
        qkv, beta, alpha = received.split(widths, -1)
        return DeltaInputs(
            qkv,
            beta,
            alpha,
            self._share(inputs.conv_weight, self.channels),
            self._share(inputs.A_log, (count,)),
            self._share(inputs.dt_bias, (count,)),
        )

    def _share(self, parameter: Tensor, sections: Sequence[int]) -> Tensor:
        """This rank's rows of each section. The gradient of the others' is theirs: it is summed with that of the data."""
        return torch.cat([s.chunk(self.size)[self.rank] for s in parameter.split(list(sections))])

    def _to_tokens(self, out: Tensor, packed: PackedRows) -> Tensor:
        """[P, HV / size, V] of all tokens -> [L, HV, V] of this rank's."""
        if self.size == 1:
            return out
        assert packed.by_rank is not None
        sent = out.flatten(1)[packed.by_rank].unflatten(0, (self.size, -1))
        received: Tensor = all_to_all(self.group, sent)  # [size, L, HV / size * V], heads of one rank after another
        return received.transpose(0, 1).reshape(received.shape[1], -1, self.heads.value_dim)
