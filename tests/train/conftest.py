"""Models and references that trainer tests share; each kind of world is spawned once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.models import make_qwen3


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose output layer is its embedding."""
    return make_qwen3(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with an output layer of its own."""
    return make_qwen3(tmp_path_factory.mktemp("model") / "untied", tied=False)
