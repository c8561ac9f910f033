"""Rank functions of test_algorithms: one step of every algorithm at the same weights, in one layout, and the expected
losses."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from slime_like.algo.bind import bind_loss, bind_token_advantage
from slime_like.algo_interfaces import LossOutput, LossView
from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import CispoConfig, DapoConfig, GrpoConfig, GspoConfig, RlooConfig
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import UserCodeError
from slime_like.metrics.types import reduce_metrics
from tests.algo.reference import importance, is_kept, surrogate
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import batch, few_micro_batches
from tests.train.models import count_tokens
from tests.train.ranks import RankWorld

# Rollout log-probabilities are random (``make_rows``), so that ratios are on both sides of every bound.
GEOMETRIC: dict[str, Any] = {"rejection": "geometric", "rejection_low": 0.8, "rejection_high": 1.2}
ALGORITHMS: dict[str, PolicyConfig] = {
    "gspo": GspoConfig(use_rollout_logprobs=True, eps_clip=0.1, eps_clip_high=0.2),
    "cispo": CispoConfig(use_rollout_logprobs=True, eps_clip=0.5, eps_clip_high=0.5),
    "dapo": DapoConfig(use_rollout_logprobs=True, eps_clip_c=1.5),
    "tis": RlooConfig(use_tis=True, tis_clip=1.3, tis_clip_low=0.7),
    "mis": GrpoConfig(use_mis=True, mis_low=0.7, mis_high=1.3),
    "geometric": GrpoConfig(**GEOMETRIC),
    "product": GrpoConfig(rejection="product", rejection_low=0.3),
    "gspo rejection": GspoConfig(**GEOMETRIC),
}
OWN = GrpoConfig(
    loss="tests.config.own_algorithm:Reinforce", token_advantage="tests.config.own_algorithm:CriticAdvantage"
)
"""A user's own loss and advantage, by path. The advantage could also compute a critic's targets, but there is no critic."""
Scored = list[tuple[PackedBatch, np.ndarray]]
"""Micro-batches and the trainer's log-probabilities [T] of their tokens."""


def every_algorithm(
    world: RankWorld, shared: Shared, layout: Layout, fault: bool = False
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return metrics and expected loss of a step of each algorithm on the reporter, {} elsewhere.

    The learning rate is 0, so that all have the same weights. ``fault`` restricts sums over sequences to one rank.
    """
    from slime_like.train.megatron.platform.collective import DifferentiableSum

    actor = make_actor(world, shared.models["two layers"], layout, optim={"lr": 0.0})
    micro_batches = micro_batches_of(layout)
    scores = [actor.score(micro_batch) for micro_batch in micro_batches]
    with replace_attribute(DifferentiableSum, "sum", lambda self, value: value) if fault else contextlib.nullcontext():
        metrics = {name: _step(actor, layout, config) for name, config in ALGORITHMS.items()}
    metrics["own"] = _own_step(actor, layout)
    names = (
        itertools.repeat(f"rank{actor.rank_info.dp_rank}")
        if layout.dp > 1
        else (f"micro{i}" for i in itertools.count())
    )
    if layout in (Layout(), Layout(dp=2)):
        metrics["names"] = {_error_of_names(actor, layout, names): 1.0}
    if not actor.rank_info.is_reporter:
        return {}, {}
    scored = list(zip(micro_batches, (score for score in scores if score is not None), strict=True))
    expected = {name: reference(config, scored) for name, config in ALGORITHMS.items()}
    return metrics, expected | {"own": own_reference(scored)}


def micro_batches_of(layout: Layout) -> list[PackedBatch]:
    """Return the micro-batches of a step.

    They are two on a single rank, in a pipeline, with data parallelism, and with context parallelism alone; otherwise one.
    """
    is_context_only = layout.cp > 1 and layout.tp == 1
    return batch(1) if layout.world_size == 1 or is_context_only else few_micro_batches(layout)(1)


def _step(actor: Any, layout: Layout, config: AlgoConfig) -> dict[str, float]:
    actor.optimizer_step._loss = bind_loss(config)
    return _train(actor, layout)


def _train(actor: Any, layout: Layout) -> dict[str, float]:
    micro_batches = micro_batches_of(layout)
    return reduce_metrics(
        actor.train_rollout([micro_batches[actor.rank_info.dp_rank :: layout.dp]], [count_tokens(micro_batches)])
    )


def _own_step(actor: Any, layout: Layout) -> dict[str, float]:
    trainer = actor
    with (
        replace_attribute(trainer, "spec", replace(trainer.spec, algo=OWN)),
        replace_attribute(trainer, "token_advantage", bind_token_advantage(OWN)),
    ):
        return _step(actor, layout, OWN)


def _error_of_names(actor: Any, layout: Layout, names: Iterator[str]) -> str:
    """Return the error of a step whose loss returns one mean per micro-batch, each under the next name of ``names``."""
    loss: Any = bind_loss(GrpoConfig())

    def renamed(view: LossView) -> LossOutput:
        output: LossOutput = loss(view)
        return replace(output, means={next(names): output.loss.detach()}, maxima={})

    setattr(renamed, "needs_entropy", False)  # noqa: B010  (functions have no such attribute)
    actor.optimizer_step._loss = renamed
    try:
        _train(actor, layout)
    except UserCodeError as error:
        return str(error)
    return "no error"


def own_reference(scored: Scored) -> float:
    """Return the loss of a step of ``OWN``, from the trainer's log-probabilities."""
    total = 0.0
    for micro_batch, score in scored:
        advantages = np.repeat(micro_batch.rewards - 0.5, np.diff(micro_batch.cu_seqlens)).astype(np.float64)
        total -= float((micro_batch.loss_weight * advantages * score).sum())
    return total


def reference(config: PolicyConfig, scored: Scored) -> float:
    """Return the loss of one step from the trainer's log-probabilities, in Python floats, sequence by sequence."""
    total = 0.0
    for micro_batch, score in scored:
        assert micro_batch.advantages is not None
        for s, (start, stop) in enumerate(itertools.pairwise(micro_batch.cu_seqlens.tolist())):
            tokens = [t for t in range(start, stop) if micro_batch.loss_weight[t] > 0]
            drift = [float(score[t]) - float(micro_batch.rollout_logprobs[t]) for t in tokens]
            logs = drift if config.use_rollout_logprobs else [0.0] * len(tokens)
            if isinstance(config, GspoConfig):
                logs = [math.fsum(logs) / len(logs)] * len(logs)
            keep = is_kept(config, math.fsum(drift), len(drift))
            for i, t in enumerate(tokens):
                ratio, logprob = torch.tensor(math.exp(logs[i])), torch.tensor(float(score[t]))
                loss = float(surrogate(config, ratio, logprob, float(micro_batch.advantages[s])))
                total += float(micro_batch.loss_weight[t]) * keep * importance(config, math.exp(drift[i])) * loss
    return total
