"""Adjustments to models with latent attention: norms, fused projections whose parts arrive in two buckets, derived weights.

SGLang uses ``rms_norm_eps`` in the norms of latents, unlike transformers. It loads a fused down projection only if both
parts are in the same call, and drops a part without its partner. It computes ``w_kc`` and ``w_vc`` of a layer when
``kv_b_proj`` is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from slime_like_plugins.plugin_names import WEIGHT_COMMIT
from slime_like_plugins.sglang_hooks import Hook, stop_on

NORM_EPSILON = 1e-6  # equal to slime_like.train.megatron.model.latent.NORM_EPSILON
PARTS = ("q_a_proj", "kv_a_proj_with_mqa")
DERIVED = ("w_kc", "w_vc")


class PairedLoader:
    """Wrapper around a model's ``load_weights`` that passes on both parts of a fused projection or neither."""

    def __init__(self, load: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self._waiting: dict[str, Tensor] = {}

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``weights``. A part without its partner is copied and kept for a later call."""
        self._load(self._pairs(weights))

    def _pairs(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            part = next((part for part in PARTS if f".{part}." in name), None)
            if part is None:
                yield name, weight
                continue
            partner = name.replace(f".{part}.", f".{PARTS[part == PARTS[0]]}.")
            if partner in self._waiting:
                yield from ((name, weight), (partner, self._waiting.pop(partner)))
            else:
                self._waiting[name] = weight.clone()  # the sender reuses its memory

    def clear(self) -> None:
        """Drop the parts that wait for their partner."""
        self._waiting.clear()


def adjust(result: Any, runner: Any) -> Any:
    """Hook after ``ModelRunner.load_model``: adjust the norms of latent attention and the loading of its fused projections.

    Raises the ``SystemExit`` of ``adjust_norms``. Remove when SGLang's norms of latents use the epsilon of transformers and its
    loader accepts the parts of a fused projection in separate calls.
    """
    if runner.use_mla_backend:
        for name, module in runner.model.named_modules():
            if hasattr(module, "kv_a_layernorm"):
                adjust_norms(name, module)
        if getattr(runner.model, "fuse_qkv_a_proj", False):
            runner.model.load_weights = PairedLoader(runner.model.load_weights)
    return result


def adjust_norms(name: str, attention: Any) -> None:
    """Set the epsilon of a layer's latent norms to ``NORM_EPSILON``.

    Raises ``SystemExit`` if the layer lacks an expected attribute.
    """
    norms = [norm for norm in (attention.kv_a_layernorm, getattr(attention, "q_a_layernorm", None)) if norm is not None]
    missing = [f"{name} has no {key}" for key in DERIVED if not isinstance(getattr(attention, key, None), Tensor)]
    missing += [
        f"{name} has a norm without variance_epsilon" for norm in norms if not hasattr(norm, "variance_epsilon")
    ]
    stop_on(WEIGHT_COMMIT, missing)
    for norm in norms:
        norm.variance_epsilon = NORM_EPSILON


def drop_waiting(model: Any) -> None:
    """Drop the parts of fused projections that an unfinished update left without their partner."""
    if isinstance(model.load_weights, PairedLoader):
        model.load_weights.clear()


def derived_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``model`` that SGLang computes from parameters at each update."""
    for name, module in model.named_modules():
        for attribute in DERIVED:
            if isinstance(tensor := getattr(module, attribute, None), Tensor):
                yield f"{name}.{attribute}", tensor


HOOK = Hook("sglang.srt.model_executor.model_runner.ModelRunner.load_model", "after", adjust)
