"""A model folder and a data file that every rule accepts, and the command line that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.model_folder import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return path


@pytest.fixture
def argv(model: Path, data: Path) -> list[str]:
    """The shortest command line that loads."""
    return [f"model.hf_checkpoint={model}", f"data.train={data}"]
