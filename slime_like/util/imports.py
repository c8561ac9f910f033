"""Faster imports of torch, SGLang, megatron and transformers."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

from slime_like.util.model_scan import scan_models_once


@contextmanager
def heavy_imports() -> Generator[None]:
    """Context manager that avoids four costs of importing torch, SGLang, megatron and transformers.

    The first two make up a third of SGLang's import time (measured: docs/measurements/startup.md).

    First, the garbage collector repeatedly scans a growing heap. It is disabled during the import, and the imported objects
    are then frozen, which also shortens later collections. Second, transformers reads the file list of every installed
    package to map modules to distributions. Here the few modules that it needs are looked up one by one. Third, torch and
    SGLang read the entry points of every installed package once for each group. Here they are read once. A module that is
    imported inside the block and contains ``from importlib.metadata import entry_points`` keeps the cached version. Last,
    transformers scans its model files twice. ``scan_models_once`` lets both uses share one scan.
    """
    collecting, original = gc.isenabled(), importlib.metadata.packages_distributions
    entry_points = importlib.metadata.entry_points
    gc.disable()
    importlib.metadata.packages_distributions = lambda: Distributions(original)
    importlib.metadata.entry_points = select_entry_points
    try:
        with scan_models_once():
            yield
    finally:
        importlib.metadata.packages_distributions = original
        importlib.metadata.entry_points = entry_points
        gc.freeze()
        if collecting:
            gc.enable()


# The original is read at import, because inside ``heavy_imports`` the name leads back to ``select_entry_points``.
_read_entry_points = importlib.metadata.entry_points


def select_entry_points(**parameters: Any) -> importlib.metadata.EntryPoints:
    """Return ``importlib.metadata.entry_points(**parameters)`` without reading files again while ``sys.path`` is unchanged."""
    return _entry_points_of(tuple(sys.path)).select(**parameters)


@functools.lru_cache(maxsize=1)
def _entry_points_of(path: tuple[str, ...]) -> importlib.metadata.EntryPoints:
    """Return the entry points of all packages in the folders of ``path``, which is ``sys.path``."""
    return _read_entry_points()


def first_import(module: str) -> AbstractContextManager[None]:
    """Return ``heavy_imports()`` if ``module`` has not been imported, otherwise a context manager that does nothing.

    ``heavy_imports`` freezes all objects, so it is used at the first import only: later, some objects may be garbage, which
    is never collected once frozen.
    """
    return nullcontext() if module in sys.modules else heavy_imports()


MODEL_CLASSES = "transformers.models.auto.modeling_auto"


@contextmanager
def without_model_classes() -> Generator[None]:
    """Context manager that blocks the import of model classes while transformers reads a config.

    transformers builds the docstring of a config class at import from all model classes, and skips it if they cannot be
    imported. Model classes import transformers' text generation and torch's compiler; blocking them saves 1.3 s. Remove this
    context manager once ``AutoConfig`` no longer imports ``modeling_auto``.
    """
    if MODEL_CLASSES in sys.modules:
        yield
        return
    modules: dict[str, ModuleType | None] = sys.modules  # pyright: ignore[reportAssignmentType]  None blocks an import
    modules[MODEL_CLASSES] = None
    try:
        yield
    finally:
        del modules[MODEL_CLASSES]


class Distributions(dict[str, list[str]]):
    """Lazy ``importlib.metadata.packages_distributions()``.

    The complete mapping is read only if a module that is looked up does not have the name of an installed distribution.
    """

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        super().__init__()
        self._read_all = read_all
        self._all: Mapping[str, list[str]] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the distributions that provide module ``key``, or ``default`` if there are none."""
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
            self._all = self._read_all()
        return self._all[key]
