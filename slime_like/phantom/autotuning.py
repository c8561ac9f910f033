"""Restriction of Triton's autotuning on a phantom GPU, on which every configuration takes the same time."""

from __future__ import annotations

import importlib
from typing import Any

NO_RESULTS = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}
"""Environment variables that keep fla and Triton from caching the fastest configuration, which would be arbitrary here."""


def use_first_configs() -> None:
    """Make Triton compile one configuration of each autotuned kernel instead of all. Remove when Triton has such an option."""
    autotuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    prune: Any = autotuner.prune_configs

    def first(self: Any, kwargs: Any) -> Any:
        return list(prune(self, kwargs))[:1]

    autotuner.prune_configs = first
