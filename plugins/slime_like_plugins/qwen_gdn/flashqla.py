"""Backend ``flashqla``: FlashQLA's fused TileLang kernels for Hopper and Blackwell, called directly.

Create ``FlashQLAGDN`` only after ``select`` has validated the machine: the constructor imports ``flash_qla``, which compiles
for the machine's GPU at import and raises an error if there is no GPU.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from torch import Tensor

from slime_like.config.schema.gdn import GDNConfig
from slime_like_plugins.qwen_gdn.backend import RangeRule
from slime_like_plugins.qwen_gdn.fla import FlaGDN


class FlashQLAGDN(FlaGDN):
    """FlashQLA for the delta rule, and fla for the convolution, which FlashQLA lacks.

    ``model.gdn.auto_cp`` allows FlashQLA to split long sequences within a GPU. The splits depend on the other sequences of
    the micro-batch and on whether a backward follows, so a token's result may depend on both. With ``auto_cp`` off, it does
    not.
    """

    name = "flashqla"

    def __init__(self, config: GDNConfig | None = None) -> None:
        super().__init__(config)
        self._rule: Any = import_module("flash_qla").chunk_gated_delta_rule
        self._auto_cp = bool(config is not None and config.auto_cp)

    def _options(self, cu_seqlens_cpu: Tensor) -> dict[str, Any]:
        return {"auto_cp": self._auto_cp}

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> RangeRule | None:
        """Return None, so that ``state_passing`` exchanges the states.

        FlashQLA's own context parallelism is not exported, and its gradients cannot be tested without GPUs.
        """
        return None

    def kernels(self) -> str:
        """Return the names and versions of the kernels."""
        versions = f"flash-qla {metadata.version('flash-qla')} on tilelang {metadata.version('tilelang')}"
        return f"{versions}, auto_cp={str(self._auto_cp).lower()}; convolution: {super().kernels()}"
