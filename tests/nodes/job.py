"""A small job for runs on several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import ModelSpec, write_model


@dataclass(frozen=True, slots=True)
class SmallJob:
    """Model and data of a job, as overrides."""

    BATCH: ClassVar[int] = 8  # groups of a rollout
    SAMPLES: ClassVar[int] = 4  # samples of a group

    folder: Path

    def overrides(self, *changes: str) -> tuple[str, ...]:
        """Return the overrides of short rollouts of a random model; ``changes`` follow them."""
        return (
            "+recipe=quickstart",
            "run.prepare=null",
            f"model.hf_checkpoint={self.folder / 'model'}",
            f"data.train={self.folder / 'train.jsonl'}",
            "evaluation.datasets={}",
            *("reward.name=tests.e2e.custom:num_digits", "reward.workers=1"),
            f"rollout.batch_size={self.BATCH}",
            f"rollout.n_samples_per_prompt={self.SAMPLES}",
            "optim.warmup_steps=0",
            "health.first_wait_s=0",
            "health.interval_s=1",
            "health.timeout_s=4",
            *changes,
        )

    def sft(self, *changes: str) -> tuple[str, ...]:
        """Return the overrides of supervised training of the same model, which needs no engine; ``changes`` follow them."""
        return (
            "+recipe=quickstart_sft",
            "run.prepare=null",
            f"model.hf_checkpoint={self.folder / 'model'}",
            f"data.train={self.folder / 'sft.jsonl'}",
            *changes,
        )


def make_job(folder: Path) -> SmallJob:
    """Write a small random model and data to ``folder``, which all nodes share."""
    ArithmeticSpec().write(folder)
    write_model(folder / "model", ModelSpec())
    return SmallJob(folder)
