"""megatron-core's Gated DeltaNet with the kernels of ``model.gdn.backend``.

Parameters, their tensor parallel sharding and their checkpoint keys are megatron's. The computation between the two projections
differs: the kernels need no repeated key heads, sequence bounds are already on the host, ``Mixing`` does the context
parallelism, decay parameters are in float32, and the gradient of the output norm is summed over the tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slime_like.train.megatron.model.layers import PackedRows
from slime_like.train.megatron.model.norms import GatedHeadNorm, RMSNorm
from slime_like.train.megatron.platform.collective import wait_for_weights
from slime_like_plugins.qwen_gdn.backend import GDNBackend
from slime_like_plugins.qwen_gdn.head_exchange import HeadExchange
from slime_like_plugins.qwen_gdn.mixing import DeltaInputs, Mixing, MixingHeads

MakeMixing = Callable[[GDNBackend, MixingHeads, Any, int], Mixing]
"""(backend, heads of this tensor parallel rank, context parallel group, channels of the hidden states) -> ``Mixing``.

The channels are 0 under sequence parallelism, which splits the tokens of a rank.
"""


class GatedDeltaNetLayer(GatedDeltaNet):
    """Gated DeltaNet over packed rows.

    megatron keeps ``A_log`` and ``dt_bias`` in the compute dtype. The 8 significant bits of bfloat16 are not enough: the effect
    of the decay grows with the distance between tokens, and an optimizer step is smaller than the last bit. Here these
    parameters, their gradients, optimizer moments and checkpoints are float32.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        *,
        backend: GDNBackend,
        make_mixing: MakeMixing = HeadExchange,
        remark: str = "",
        **kwargs: Any,
    ) -> None:
        self.backend, self.remark = backend, remark
        super().__init__(config, submodules, **kwargs)
        for name in ("A_log", "dt_bias"):
            setattr(self, name, _in_f32(getattr(self, name)))
        self.heads = _heads(config, self.tp_size)
        hidden = 0 if config.sequence_parallel else config.hidden_size
        self.mixing = make_mixing(backend, self.heads, self.pg_collection.cp, hidden)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        rule: Any = self.backend.chunk_rule
        self.gated_delta_rule = rule  # instead of fla's rule

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, and the bias of the output projection.

        The layer's output has the shape of ``hidden_states`` [L, 1, hidden] (L / tp with sequence parallelism).
        """
        assert isinstance(packed_seq_params, PackedRows) and attention_mask is None
        mixer_input = self.mixing.enter(hidden_states, packed_seq_params)
        projection: Tensor = self.in_proj(mixer_input)[0][:, 0]
        heads = self.heads
        widths = (sum(heads.channels), heads.channels[2], heads.values, heads.values)
        qkv, gate, beta, alpha = projection.split(widths, -1)
        inputs = DeltaInputs(qkv, beta, alpha, self._conv_weight(), self.A_log, self.dt_bias)
        mixed = self.mixing(inputs, packed_seq_params)
        out: Tensor = self.out_norm(mixed, gate.unflatten(-1, (heads.values, heads.value_dim)))
        result, bias = self.out_proj(out.flatten(1)[:, None])
        return self.mixing.leave(result, packed_seq_params), bias

    def kernels(self) -> str:
        """Return a log message that names the kernels of this layer."""
        return f"Gated DeltaNet ran on {self.backend.name}: {self.backend.kernels()}{self.remark}"

    def _conv_weight(self) -> Tensor:
        """Wait until the convolution's weight [C, W] has been gathered (``overlap_param_gather``), and return it.

        Collective over the data parallel ranks, as ``wait_for_weights`` is.
        """
        wait_for_weights(self.conv1d)
        return self.conv1d.weight[:, 0]


def _heads(config: TransformerConfig, tp: int) -> MixingHeads:
    """Return the heads of each of ``tp`` tensor parallel ranks."""
    sizes: Any = config  # megatron declares them optional
    all_heads = MixingHeads(
        sizes.linear_num_key_heads,
        sizes.linear_num_value_heads,
        sizes.linear_key_head_dim,
        sizes.linear_value_head_dim,
    )
    return all_heads.shared_by(tp)


def _in_f32(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a float32 ``Parameter`` with the values of ``parameter`` and megatron's tensor parallel attributes."""
    wide = torch.nn.Parameter(parameter.detach().float())
    for name in ("tensor_model_parallel", "partition_dim"):
        setattr(wide, name, getattr(parameter, name))
    return wide


def layer_spec(backend: GDNBackend, make_mixing: MakeMixing = HeadExchange, remark: str = "") -> ModuleSpec:
    """Return the spec of a hybrid stack's layer: norm, Gated DeltaNet, residual.

    ``remark`` is the end of the log message that ``GatedDeltaNetLayer.kernels`` returns.
    """
    residual: Any = get_bias_dropout_add  # megatron annotates a function as a type
    mixer = ModuleSpec(
        GatedDeltaNetLayer,
        params={"backend": backend, "make_mixing": make_mixing, "remark": remark},
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=GatedHeadNorm, out_proj=RowParallelLinear
        ),
    )
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(input_layernorm=RMSNorm, self_attention=mixer, self_attn_bda=residual),
    )
