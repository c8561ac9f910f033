"""Rank functions of test_sample_difference: train on samples like an engine's, then on samples with a fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConsistencyError
from slime_like.metrics.types import reduce_metrics
from slime_like.types import F32
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import digest, four_micro_batches
from tests.train.models import count_tokens, join_rows
from tests.train.ranks import RankWorld
from tests.train.training import _from_reporter

TOLERANCE = 1e-4
Columns = Sequence[F32]


def with_engine_logprobs(rows: Sequence[PackedBatch], columns: Columns, version: int) -> list[PackedBatch]:
    """Return ``rows`` with log-probabilities and version of an engine, and sample ids that identify the micro-batch."""
    return [
        replace(
            row,
            rollout_logprobs=np.where(row.versions >= 0, column, 0).astype(np.float32),
            versions=np.where(row.versions >= 0, version, -1).astype(np.int32),
            sample_ids=row.sample_ids + 100 * index,
        )
        for index, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]


def gate(world: RankWorld, shared: Shared, layout: Layout, steps: int) -> dict[str, Any]:
    """Return the metrics of correct rollouts, and per fault the error and whether weights and version are unchanged."""
    actor = make_actor(
        world,
        shared.models["two layers"],
        layout,
        algo=GrpoConfig(kl_loss_coef=0.1),
        steps_per_rollout=steps,
        sample_tolerance=TOLERANCE,
        drift_by_layer=True,
        optim={"lr": 1e-2},
    )
    plan = [four_micro_batches(10 * k) for k in range(steps)]

    def scores() -> list[Columns]:
        return [_scores_of(actor, rows) for rows in plan]

    def train(
        columns: Sequence[Columns], version: int, change: Callable[[PackedBatch], PackedBatch] = lambda row: row
    ) -> Any:
        """Train on a rollout after applying ``change`` to the last micro-batch of the last optimizer step."""
        batches = [with_engine_logprobs(rows, column, version) for rows, column in zip(plan, columns, strict=True)]
        batches[-1][-1] = change(batches[-1][-1])
        shards = [batch[actor.rank_info.dp_rank :: layout.dp] for batch in batches]
        return reduce_metrics(actor.train_rollout(shards, [count_tokens(batch) for batch in batches]))

    def train_error(
        columns: Sequence[Columns], change: Callable[[PackedBatch], PackedBatch] = lambda row: row
    ) -> tuple[str, bool]:
        before = digest(actor), actor.version
        try:
            train(columns, actor.version, change)
        except ConsistencyError as error:
            return str(error), (digest(actor), actor.version) == before
        return "no error", False

    initial_scores = scores()
    results: dict[str, Any] = {"healthy": train(initial_scores, 0)}
    actor.spec = replace(actor.spec, drift_by_layer=False)  # slow, and without effect on refusals
    current_scores = scores()
    results["older weights"] = train_error(initial_scores)
    results["shifted"] = train_error(
        current_scores, lambda row: replace(row, rollout_logprobs=np.roll(row.rollout_logprobs, 1))
    )
    actor.logprob_settings = replace(actor.logprob_settings, temperature=0.75)
    results["temperature"] = train_error(scores())
    actor.logprob_settings = replace(actor.logprob_settings, temperature=0.7)
    actor.spec = replace(actor.spec, sample_tolerance=math.inf)
    results["not a number"] = train_error(
        current_scores, lambda row: replace(row, rollout_logprobs=row.rollout_logprobs * np.float32(np.nan))
    )
    actor.spec = replace(actor.spec, sample_tolerance=TOLERANCE)
    results["mixed"] = train(current_scores, actor.version, begun_by_another)
    with one_tensor_left_behind(actor):
        results["reference"] = train_error(scores())
    return results


def _scores_of(actor: Any, rows: Sequence[PackedBatch]) -> Columns:
    """Return the scores [T] of each micro-batch, from one forward pass over all."""
    scores = _from_reporter(actor.score(functools.reduce(join_rows, rows)))
    return np.split(scores, np.cumsum([len(row.token_ids) for row in rows])[:-1])


def begun_by_another(row: PackedBatch) -> PackedBatch:
    """Return ``row`` with an older version at the first sampled token of each sequence, and logprobs 1 too low."""
    versions = row.versions.copy()
    versions[[start + np.argmax(versions[start:] >= 0) for start in row.cu_seqlens[:-1]]] = 0
    return replace(row, versions=versions, rollout_logprobs=row.rollout_logprobs - np.float32(1))


@contextmanager
def one_tensor_left_behind(actor: Any) -> Generator[None]:
    """Make the swap of the reference leave one of its tensors in the policy."""
    trainer = actor
    stale_name = min(name for name in trainer.reference if "linear_fc2" in name)

    def fill(weights: dict[str, Any]) -> None:
        stock({**weights, stale_name: trainer.reference[stale_name]} if stale_name in weights else weights)

    stock = trainer._set_weights
    with replace_attribute(trainer, "_set_weights", fill):
        yield
