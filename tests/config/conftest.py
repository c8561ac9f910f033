"""Fixtures: a valid model folder and data file, the command line that names them, and its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.config.load.loader import load_config
from tests.config.machines import LAPTOP
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
    """Return the shortest command line that loads."""
    return [f"model.hf_checkpoint={model}", f"data.train={data}"]


@pytest.fixture
def plan(argv: list[str]) -> Callable[..., Plan]:
    """Return a function that plans ``argv`` with extra arguments, for a laptop or another machine."""

    def make(*extra: str, machine: Machine = LAPTOP) -> Plan:
        return make_plan(load_config([*argv, *extra]), machine)

    return make
