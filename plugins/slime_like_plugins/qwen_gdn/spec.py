"""The entry of table ``MIXERS``: a Gated DeltaNet layer with the kernels that the config asks for."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from slime_like.config.gdn import gdn_cp_mode
from slime_like.config.model import ModelConfig
from slime_like.train.megatron.groups import Place
from slime_like_plugins.qwen_gdn import layer, select
from slime_like_plugins.qwen_gdn.head_wise import HeadWise
from slime_like_plugins.qwen_gdn.state_passing import StatePassing


def layer_spec(config: TransformerConfig, model: ModelConfig, place: Place) -> ModuleSpec:
    """A layer of the hybrid stack. Raises ``ConfigError`` where the backend cannot run here."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    assert heads[0] is not None and heads[1] is not None
    mode, _ = gdn_cp_mode(model.gdn.cp_mode, heads[0], heads[1], tp=place.layout.tp, cp=place.layout.cp)
    mixing = StatePassing if mode == "state" and place.layout.cp > 1 else HeadWise
    return layer.layer_spec(select.resolve(model.gdn, place.device.type), mixing)
