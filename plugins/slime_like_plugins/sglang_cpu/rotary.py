"""Rotary embeddings for latent attention on a CPU, also without ``rope_scaling``, which SGLang's ``get_rope_cpu`` requires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.rotary_embedding import factory

from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_hooks import wrap_target


def install() -> None:
    """Replace SGLang's ``get_rope_cpu`` in this process. Raises ``SystemExit`` if it does not exist.

    Remove when ``get_rope_cpu`` accepts models without ``rope_scaling``.
    """
    wrap_target(CPU, f"{factory.__name__}.get_rope_cpu", with_unscaled)


def with_unscaled(scaled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``scaled`` for models with ``rope_scaling``, and SGLang's general function for others."""

    def get_rope(  # noqa: PLR0913  (a signature of SGLang)
        head_size: int,
        rotary_dim: int,
        max_position: int,
        base: int,
        is_neox_style: bool = True,
        rope_scaling: dict[str, Any] | None = None,
        dtype: Any = None,
        partial_rotary_factor: float = 1.0,
        device: str | None = None,
    ) -> Any:
        arguments = (
            head_size,
            rotary_dim,
            max_position,
            base,
            is_neox_style,
            rope_scaling,
            dtype,
            partial_rotary_factor,
        )
        return factory.get_rope(*arguments) if rope_scaling is None else scaled(*arguments, device)

    return get_rope
