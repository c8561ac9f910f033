"""Import SGLang without libraries that an engine never uses. This saves half a second of CPU time per start."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from slime_like.util.imports import heavy_imports

LOSSES = "transformers.loss.loss_utils"


@contextmanager
def sglang_imports() -> Generator[None]:
    """Let the block import SGLang faster.

    This applies ``heavy_imports``, ``import_gguf``, ``deferred_losses`` and ``block_megatron``.

    Imports of megatron fail after the block too.
    """
    block_megatron()
    with heavy_imports(), deferred_losses():
        import_gguf()
        yield


def block_megatron() -> None:
    """Make imports of megatron fail in this process: SGLang's dumper takes a second to import it, and works without it."""
    sys.modules["megatron"] = None  # pyright: ignore[reportArgumentType]  None blocks an import


def import_gguf() -> None:
    """Import gguf without mistral_common, which only gguf's tokenizer converters use.

    If mistral_common has been imported already, do nothing.

    Remove this function once gguf imports mistral_common only in these converters.
    """
    modules: dict[str, ModuleType | None] = sys.modules  # pyright: ignore[reportAssignmentType]
    if "mistral_common" in modules:
        return
    modules["mistral_common"] = None
    try:
        importlib.import_module("gguf")
    finally:
        del modules["mistral_common"]


@contextmanager
def deferred_losses() -> Generator[None]:
    """Let the block import the model classes of transformers without the library's losses, two of which import scipy.

    The losses are imported when one is first used.

    Remove this function once ``transformers.modeling_utils`` imports losses only to compute them.
    """
    if LOSSES in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(LOSSES)
    stand_in.LOSS_MAPPING = DeferredLosses()
    sys.modules[LOSSES] = stand_in
    try:
        yield
    finally:
        if sys.modules[LOSSES] is stand_in:
            del sys.modules[LOSSES]


class DeferredLosses(Mapping[str, Any]):
    """``LOSS_MAPPING`` of transformers, imported on first use. Do not use it in the block of ``deferred_losses``."""

    @functools.cached_property
    def _losses(self) -> Mapping[str, Any]:
        return importlib.import_module(LOSSES).LOSS_MAPPING

    def __getitem__(self, key: str) -> Any:
        return self._losses[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._losses)

    def __len__(self) -> int:
        return len(self._losses)
