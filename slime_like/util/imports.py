"""Importing large libraries faster: what a process that is about to import torch, SGLang or megatron does first."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def heavy_imports() -> Generator[None]:
    """Import inside without two costs that together are a third of SGLang's import (measured: docs/measurements/startup.md).

    The garbage collector scans a heap that only grows, again and again: it is off meanwhile, and what was imported is
    then set aside for good, which also shortens every later collection. And transformers asks which distribution brings
    which module by reading the file list of every installed package: answered here for the few names it asks about.
    """
    collecting, whole = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = lambda: Distributions(whole)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = whole
        gc.freeze()
        if collecting:
            gc.enable()


MODEL_CLASSES = "transformers.models.auto.modeling_auto"


@contextmanager
def without_model_classes() -> Generator[None]:
    """Read a config with transformers and leave its model classes alone, which bring generation and torch's compiler: 1.3 s.

    transformers writes the docstring of each config class when it is imported, and looks into every model class for it;
    where those cannot be imported it goes without. Until an ``AutoConfig`` no longer imports ``modeling_auto``.
    """
    if MODEL_CLASSES in sys.modules:
        yield
        return
    modules: dict[str, ModuleType | None] = sys.modules  # pyright: ignore[reportAssignmentType]  None: not to be imported
    modules[MODEL_CLASSES] = None
    try:
        yield
    finally:
        del modules[MODEL_CLASSES]


class Distributions(dict[str, list[str]]):
    """``importlib.metadata.packages_distributions()`` looked up by name; read whole once a name is not its own distribution."""

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        super().__init__()
        self._read_all = read_all
        self._all: Mapping[str, list[str]] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Distributions that bring module ``key``."""
        try:
            return self[key]
        except KeyError:
            return default

    def __missing__(self, key: str) -> list[str]:
        if self._all is None:
            try:
                importlib.metadata.distribution(key)
            except importlib.metadata.PackageNotFoundError:
                pass
            else:
                return [key]
        self._all = self._all or self._read_all()
        return self._all[key]
