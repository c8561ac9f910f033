"""The ``flashqla`` backend: FlashQLA's fused TileLang kernels for Hopper and Blackwell, called directly.

Import it after ``select`` has validated the machine: the package compiles for the GPU it finds when it is imported, and
raises where it finds none.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from torch import Tensor

from slime_like.config.schema.gdn import GDNConfig
from slime_like_plugins.qwen_gdn.backend import RangeRule
from slime_like_plugins.qwen_gdn.fla import FlaGDN


class FlashQLAGDN(FlaGDN):
    """FlashQLA for the rule; it has no convolution, which stays fla's.

    ``model.gdn.auto_cp`` lets it split long sequences within the GPU. Where it splits depends on what is packed together
    and on whether a backward will follow, so that the same tokens may get other bits; off, they do not.
    """

    name = "flashqla"

    def __init__(self, config: GDNConfig | None = None) -> None:
        super().__init__(config)
        self._rule: Any = import_module("flash_qla").chunk_gated_delta_rule
        self._auto_cp = bool(config is not None and config.auto_cp)

    def _options(self, cu_seqlens_cpu: Tensor) -> dict[str, Any]:
        return {"auto_cp": self._auto_cp}

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> RangeRule | None:
        """See ``backend.GDNBackend.range_rule``. The package shares a stream among GPUs, too, but does not export how, and
        nothing of it runs without a GPU: gradients across ranks would be taken on trust."""
        return None

    def kernels(self) -> str:
        """See ``backend.GDNBackend.kernels``."""
        versions = f"flash-qla {metadata.version('flash-qla')} on tilelang {metadata.version('tilelang')}"
        return f"{versions}, auto_cp={str(self._auto_cp).lower()}; convolution: {super().kernels()}"
