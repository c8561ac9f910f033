"""One warm start for all end-to-end tests: the quickstart's own, by its own recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.util.deadline import Deadline
from slime_like.util.private import exclusive
from tests.e2e.runs import RUN_S, Training

SFT_STEPS = 120
# A quarter of a recipe's demonstrations per step, at twice its learning rate, teaches a model the same.
BRISK = ("rollout.batch_size=64", "optim.lr=2e-3")
SMALL = ("rollout.batch_size=16", "rollout.n_samples_per_prompt=8")  # rollouts of 128 samples


@dataclass(frozen=True, slots=True)
class Warm:
    """The warm-started model and its data, as overrides for a recipe."""

    folder: Path

    @property
    def hf(self) -> Path:
        """Its weights."""
        return self.folder / "sft" / "hf"

    @property
    def overrides(self) -> tuple[str, ...]:
        return (
            "run.prepare=null",
            f"model.hf_checkpoint={self.hf}",
            f"data.train={self.folder / 'assets' / 'train.jsonl'}",
            f"evaluation.datasets={{arithmetic: '{self.folder / 'assets' / 'heldout.jsonl'}@[0:100]'}}",
        )


def warm_start(folder: Path, recipe: str, steps: int, *changes: str) -> Warm:
    """Data, random model and warm start of ``recipe`` in ``folder``."""
    return warmed(folder, begin_warm_start(folder, recipe, steps, *changes))


def begin_warm_start(folder: Path, recipe: str, steps: int, *changes: str) -> Training:
    """The run of a warm start, which others may run beside; ``changes`` are overrides of the recipe."""
    return Training(
        f"+recipe={recipe}",
        f"run.dir={folder / 'sft'}",
        f"model.hf_checkpoint={folder / 'assets' / 'model'}",
        f"data.train={folder / 'assets' / 'sft.jsonl'}",
        f"loop.num_rollout={steps}",
        f"run.save_hf_interval={steps // 2}",
        *changes,
        log=folder / "sft.log",
    )


def warmed(folder: Path, training: Training) -> Warm:
    """What the warm start has made, once it is done."""
    done = training.wait()
    assert done.code == 0, done.output
    return Warm(folder)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever ended the runs of this session, no process, port or name in /dev/shm is left of them."""
    yield
    assert [left for training in Training.started for left in training.leftovers()] == []


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Warm:
    """The warm start of the quickstart, made by the first process of the session that needs it; others wait for it."""
    parallel = hasattr(request.config, "workerinput")
    folder = tmp_path_factory.getbasetemp().parent / "warm" if parallel else tmp_path_factory.mktemp("warm")
    folder.mkdir(exist_ok=True)
    deadline = Deadline("test", "the warm start", RUN_S)
    with exclusive(folder / "lock", deadline, "another process of this session, which makes it"):
        done = folder / "done"
        warm = Warm(folder) if done.exists() else warm_start(folder, "quickstart_sft", SFT_STEPS, *BRISK)
        done.touch()
    return warm
