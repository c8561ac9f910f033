"""Spec of a Gated DeltaNet layer with the kernels that the config selects, for registration in ``MIXERS``."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.gdn import gdn_cp_mode
from slime_like.config.schema.model import ModelConfig
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like_plugins.qwen_gdn import layer, select
from slime_like_plugins.qwen_gdn.head_exchange import HeadExchange
from slime_like_plugins.qwen_gdn.state_passing import StatePassing


def layer_spec(config: TransformerConfig, model: ModelConfig, rank_info: RankInfo) -> ModuleSpec:
    """Return the spec of a layer of the hybrid stack.

    Raises ``ConfigError`` if the backend cannot run here, or if ``cp_mode=head`` and tp * cp does not divide the heads.
    """
    sizes: Any = config  # megatron declares them optional
    shape = GDNShape(
        key_heads=sizes.linear_num_key_heads,
        value_heads=sizes.linear_num_value_heads,
        key_dim=sizes.linear_key_head_dim,
        value_dim=sizes.linear_value_head_dim,
        conv_width=sizes.linear_conv_kernel_dim,
    )
    tp, cp = rank_info.layout.tp, rank_info.layout.cp
    mode, reason = gdn_cp_mode(model.gdn.cp_mode, shape.key_heads, shape.value_heads, tp=tp, cp=cp)
    backend = select.resolve(model.gdn, rank_info.device.type, model.dtype, shape)
    if cp == 1:  # the mode has no effect
        return layer.layer_spec(backend)
    remark = f"; model.gdn.cp_mode={mode}{f' ({reason})' if reason else ''}"
    return layer.layer_spec(backend, StatePassing if mode == "state" else HeadExchange, remark)
