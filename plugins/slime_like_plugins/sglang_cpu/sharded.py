"""Registration of the attention backends for a sharded KV cache on a CPU; the plugin ``dcp`` provides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_like_plugins.sglang_cpu.attention import BatchedAttention
    from slime_like_plugins.sglang_cpu.kernels import CKernels

    type BackendFactory = Callable[[Any, CKernels | None], BatchedAttention]

_providers: list[Callable[[bool], BackendFactory]] = []


def provide(provider: Callable[[bool], BackendFactory]) -> None:
    """Make ``factory`` return ``provider(latent)``; ``latent`` is True for a cache of latents."""
    _providers[:] = [provider]


def factory(latent: bool) -> BackendFactory:
    """Return a function that creates an attention backend from a model runner and C kernels, for latents if ``latent``.

    Raises ``NotImplementedError`` if the plugin ``dcp`` is not enabled.
    """
    if not _providers:
        raise NotImplementedError(
            "dcp_size > 1 on a CPU needs the plugin dcp: add it to SLIME_LIKE_SGLANG, or set --dcp-size 1"
        )
    return _providers[0](latent)
