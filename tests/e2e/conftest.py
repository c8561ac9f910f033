"""One warm start for all end-to-end tests: the quickstart's own, by its own recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import Training

SFT_STEPS = 120
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


def warm_start(folder: Path, recipe: str, steps: int) -> Warm:
    """Data, random model and warm start of ``recipe`` in ``folder``."""
    return warmed(folder, begin_warm_start(folder, recipe, steps))


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
def warm(tmp_path_factory: pytest.TempPathFactory) -> Warm:
    return warm_start(tmp_path_factory.mktemp("warm"), "quickstart_sft", SFT_STEPS)
