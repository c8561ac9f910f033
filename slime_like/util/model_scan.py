"""One scan of transformers' model files per import: transformers scans them twice, each time for 0.3 s of CPU time."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"
SCAN = "create_import_structure_from_path"  # function of this module that scans a folder; it calls itself for each subfolder


class CachedScan:
    """Import hook (``sys.meta_path``) that, when ``MODULE`` is imported, replaces its function ``SCAN`` with a cached one."""

    def __init__(self) -> None:
        self._original: tuple[ModuleType, Any] | None = None

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                assert hasattr(module, SCAN), f"transformers moved {SCAN}: find how it scans its models now"
                self._original = module, getattr(module, SCAN)
                setattr(module, SCAN, functools.cache(getattr(module, SCAN)))

            loader.exec_module = exec_module
        return spec

    def restore(self) -> None:
        """Restore the original function and free the cached results."""
        if self._original is not None:
            module, function = self._original
            setattr(module, SCAN, function)


@contextmanager
def scan_models_once() -> Generator[None]:
    """Context manager for a first import of transformers: ``transformers`` and ``transformers.models`` share one scan.

    Remove this function once transformers scans its models only once.
    """
    finder = CachedScan()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.restore()
