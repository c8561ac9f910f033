"""The entry of table ``MIXERS``: a Gated DeltaNet layer with the kernels that the config asks for."""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from slime_like.config.model import ModelConfig
from slime_like.train.megatron.groups import Place
from slime_like_plugins.qwen_gdn import layer, select


def layer_spec(config: TransformerConfig, model: ModelConfig, place: Place) -> ModuleSpec:
    """A layer of the hybrid stack. Raises ``ConfigError`` where the backend cannot run here."""
    return layer.layer_spec(select.resolve(model.gdn, place.device.type))
