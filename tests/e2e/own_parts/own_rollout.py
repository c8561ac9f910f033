"""A user's parts that run in the driver, the rollout manager and the reward's processes."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

import numpy as np
from own_record import record

from slime_like.algo.advantage import dr_grpo
from slime_like.config.schema.rollout import DataConfig
from slime_like.config.schema.run import MetricsConfig
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.interfaces import Engine, GenerateContext
from slime_like.metrics.types import Last, Metric, SinkContext, StepSpans
from slime_like.rollout.generate.single_turn import single_turn
from slime_like.types import F32, Prompt, Sample, SampleGroup

MIN_REWARD = 100.0
NUM_SAMPLES = 3  # of a group, whatever rollout.n_samples_per_prompt is
BAD_ROWS = 7.0
GROUP_ADVANTAGE = 3.0
LOGGED = "train/own_loss"


def own_reward(prompt: Prompt, sample: Sample) -> float:
    """Return ``MIN_REWARD`` plus the number of digits."""
    del prompt
    record("reward")
    return MIN_REWARD + sum(character.isdigit() for character in sample.text)


def own_filter(group: SampleGroup) -> str | None:
    """Drop the groups of prompts with an odd number."""
    record("filter")
    return "odd" if group.prompt.prompt_id % 2 else None


async def own_generate(
    prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
) -> Sequence[Sample]:
    """Return ``NUM_SAMPLES`` samples."""
    record("generate function")
    return await single_turn(prompt, engine, seeds[:NUM_SAMPLES], context)


class OwnSource(FileSource):
    """The prompts of the file, with ``BAD_ROWS`` as the number of bad rows."""

    def __init__(self, config: DataConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        record("data source")

    def metrics(self) -> tuple[Metric, ...]:
        return (Last("data/bad_rows", BAD_ROWS),)


class OwnSink:
    """Sink that writes ``own.csv`` in the run's folder."""

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        del config
        self._file = (context.run_dir / "own.csv").open("a", newline="")

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Write a row: the step and its metric ``LOGGED``, empty in a step without it."""
        del spans
        record("metric sink")
        csv.writer(self._file).writerow((step, values.get(LOGGED, "")))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def own_group_advantage(rewards_G: F32) -> F32:
    """Return ``GROUP_ADVANTAGE`` for rewards above the group's mean, its negative for those below, else 0."""
    record("group advantage")
    return (GROUP_ADVANTAGE * np.sign(dr_grpo(rewards_G))).astype(np.float32)
