"""Hooks that start engines and Ray workers as forks of a test's servers.

Engines: tests/engine/forked_engines.py. Workers: tests/e2e/worker_server.py.

Python imports this module at startup if this folder is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fork_client

SERVER = "slime_like.rollout.engine.server"
REPOSITORY = str(Path(__file__).parents[3])


class EngineServerFinder:
    """Import hook that replaces ``EngineServer._spawn`` once its module is imported (``sys.meta_path`` protocol)."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != SERVER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = spec.loader if spec else None
        assert loader is not None, f"{SERVER} was renamed"
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            is_missing = REPOSITORY not in sys.path  # as in a user's own script
            if is_missing:
                sys.path.append(REPOSITORY)
            from tests.engine.forked_engines import fork_engines_of

            if is_missing:
                sys.path.remove(REPOSITORY)
            fork_engines_of(module)

        loader.exec_module = exec_module
        return spec


if fork_client.forks(sys.orig_argv):
    fork_client.run_in_fork(sys.orig_argv)
sys.meta_path.insert(0, EngineServerFinder())
