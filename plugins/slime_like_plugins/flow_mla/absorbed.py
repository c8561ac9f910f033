"""Weights of absorbed latent attention, ``w_kc`` and ``w_vc``, which SGLang computes from ``kv_b_proj`` after each load.

They are sharded with ``kv_b_proj``. SGLang computes them from whole matrices, so each layer is gathered once per load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime_like_plugins.flow_mla.layout import Matrix

SOURCE = "kv_b_proj"


def absorbed_weights(attention: Any, module: Any) -> Iterator[tuple[str, Matrix]]:
    """Yield name and layout of the weights that SGLang will compute from ``module`` if it is ``kv_b_proj``, else nothing."""
    if getattr(attention, SOURCE, None) is not module:
        return
    weight = module.weight
    keys, values, latent = attention.qk_nope_head_dim, attention.v_head_dim, weight.shape[1]
    heads = weight.shape[0] // (keys + values)
    yield "w_kc", Matrix((heads, keys, latent), (keys * latent, 1, keys), weight.dtype)
    yield "w_vc", Matrix((heads, latent, values), (latent * values, 1, latent), weight.dtype)


def compute_by_layer(
    compute: Callable[[list[str]], None],
    update: Callable[[Any, Callable[[], None]], None],
    model: Any,
    names: Iterable[str],
) -> None:
    """Call ``compute``, within ``update``, for each layer of this process whose ``kv_b_proj`` weight is in ``names``.

    ``compute`` is SGLang's function that computes the absorbed weights from the source weights with the given names;
    ``update`` is ``ShardedWeights.update``. All ranks call this function with the same layers.
    """
    layers = {int(name.split(".")[2]) for name in names if SOURCE in name}
    for index in sorted(layers):
        if model.start_layer <= index < model.end_layer:
            update(model.layers[index], lambda index=index: compute([source_name(index)]))


def source_name(layer: int) -> str:
    """Return the checkpoint name of the weight from which the absorbed weights of ``layer`` are computed."""
    return f"model.layers.{layer}.self_attn.{SOURCE}.weight"
