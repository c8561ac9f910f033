"""The warm start of the quickstart, which all end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.util.deadline import Deadline
from slime_like.util.private import exclusive
from tests.e2e.runs import RUN_S, Training, train
from tests.e2e.worker_server import forking_workers

SFT_STEPS = 120
# A quarter of the recipe's demonstrations per step at twice its learning rate gives the same accuracy.
FAST_SFT = ("rollout.batch_size=64", "optim.lr=2e-3")
SMALL_ROLLOUTS = ("rollout.batch_size=16", "rollout.n_samples_per_prompt=8")  # rollouts of 128 samples


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A warm-started model with its data, as overrides of a recipe."""

    folder: Path

    @property
    def hf(self) -> Path:
        """Return the folder of the model's weights."""
        return self.folder / "sft" / "hf"

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            "run.prepare=null",
            f"model.hf_checkpoint={self.hf}",
            f"data.train={self.folder / 'assets' / 'train.jsonl'}",
            f"evaluation.datasets={{arithmetic: '{self.folder / 'assets' / 'heldout.jsonl'}@[0:100]'}}",
        )


def run_warm_start(folder: Path, recipe: str, steps: int, *changes: str) -> WarmStart:
    """Create data and a random model in ``folder`` and train the model by ``recipe``; ``changes`` are overrides of the recipe."""
    result = train(
        f"+recipe={recipe}",
        f"run.dir={folder / 'sft'}",
        f"model.hf_checkpoint={folder / 'assets' / 'model'}",
        f"data.train={folder / 'assets' / 'sft.jsonl'}",
        f"loop.num_rollout={steps}",
        f"run.save_hf_interval={steps // 2}",
        *changes,
        log=folder / "sft.log",
        environment=forking_workers(),
    )
    assert result.code == 0, result.output
    return WarmStart(folder)


@pytest.fixture(scope="session", autouse=True)
def check_leftovers() -> Iterator[None]:
    """After all tests, assert that no run of this session left a process, a port or a name in /dev/shm."""
    yield
    assert [leftover for training in Training.instances for leftover in training.leftovers()] == []


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> WarmStart:
    """Return the warm start of the quickstart. The first process that needs it runs it; the other processes wait."""
    parallel = hasattr(request.config, "workerinput")
    folder = tmp_path_factory.getbasetemp().parent / "warm" if parallel else tmp_path_factory.mktemp("warm")
    folder.mkdir(exist_ok=True)
    deadline = Deadline("test", "the warm start", RUN_S)
    with exclusive(folder / "lock", deadline, "another process of this session, which makes it"):
        marker = folder / "done"
        warm_start = (
            WarmStart(folder) if marker.exists() else run_warm_start(folder, "quickstart_sft", SFT_STEPS, *FAST_SFT)
        )
        marker.touch()
    return warm_start
