"""Ranks of the tests of this folder, on forks of one process that has imported megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.train.jobs import Results, run_forked
from tests.train.models import make_model


@pytest.fixture(scope="session")
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the output of the ranks, one subfolder per test module."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, folder_of_ranks: Path) -> Results:
    """Return module name -> results of the ranks, for each collected module with ``call_on_ranks``."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    modules = {module.__name__: module for item in functions if (module := item.module) is not None}
    models = {name: make_model(folder_of_ranks / name, name, tied=False) for name in ("qwen3", "qwen3_moe")}
    calls: dict[str, tuple[Any, ...]] = {}
    # In reverse order, so that the ranks of test_forensics run last, shortly before its tests read their files.
    for name, module in sorted(modules.items(), reverse=True):
        if name.startswith("tests.distributed.") and hasattr(module, "call_on_ranks"):
            (folder_of_ranks / name).mkdir()
            calls[name] = module.call_on_ranks(models, folder_of_ranks / name)
    return run_forked(calls)
