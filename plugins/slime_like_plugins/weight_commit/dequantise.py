"""Hook that multiplies float8 weights by their scales while SGLang reads a checkpoint.

SGLang would keep such weights in float8 and copy pushed weights into them without scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from slime_like.train.megatron.families.hf import HFFolder
from slime_like_plugins.plugin_names import DEQUANTISE
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

type ReadWeights = Callable[..., Iterable[tuple[str, Tensor]]]


def weights(original: ReadWeights, loader: Any, source: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
    """Hook around ``DefaultModelLoader._get_weights_iterator``: multiply float8 weights by their scales, and drop the scales."""
    folder = HFFolder(source.model_or_path)
    for name, tensor in original(loader, source, **options):
        stored_name = name.removeprefix(source.prefix)
        if not folder.is_scale(stored_name):
            yield name, folder.apply_scales(stored_name, tensor)


HOOKS = (Hook("sglang.srt.model_loader.loader.DefaultModelLoader._get_weights_iterator", "around", weights),)


def install() -> None:
    """Apply the hook in this process. Raises ``SystemExit`` if it does not take effect."""
    install_hooks(DEQUANTISE, HOOKS)
