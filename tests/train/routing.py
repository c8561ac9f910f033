"""Rank function of test_routing_replay: training replays the experts chosen in the pass for old log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from slime_like.config.schema.resolved import Layout
from slime_like.metrics.types import reduce_metrics
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import four_micro_batches
from tests.train.models import count_tokens
from tests.train.parity import ALGO
from tests.train.ranks import RankWorld


@dataclass(frozen=True)
class OldChoice:
    """Differences of log-probabilities with replayed and own experts, and the comparison of both choices."""

    unchanged: float  # largest difference to the recording pass, with its router and its experts
    moved: float  # largest difference between replayed and own experts, with the changed router
    share: float
    gap: float
    metrics: dict[str, float]


def old_choice(world: RankWorld, shared: Shared, layout: Layout, model: dict[str, Any]) -> OldChoice:
    """Record experts, change the routers, and replay. Then train a rollout of two optimizer steps."""
    from slime_like.train.megatron.model.model import named_weights

    algo = replace(ALGO, routing_replay="old")
    folder = shared.models["qwen3_moe"]
    actor: Any = make_actor(world, folder, layout, algo=algo, steps_per_rollout=2, model=model, optim={"lr": 1e-2})
    plan = [four_micro_batches(10 * step) for step in range(2)]
    shards = [rows[actor.rank_info.dp_rank :: layout.dp] for rows in plan]
    micros = [actor.lay_out(row) for row in shards[0]]
    routers = [weight for key, weight in named_weights(actor.model) if key.endswith("router.weight")]
    with actor.routing.in_old_pass(micros):
        first_scores = actor._scores(micros)
    with torch.no_grad():
        for weight in routers:
            weight.neg_()
    own = actor._scores(micros)
    with actor.routing.in_training(micros):
        replayed = actor._scores(micros)
    difference = actor.routing.difference()
    with torch.no_grad():
        for weight in routers:
            weight.neg_()
    with actor.routing.replay(micros, compare=False):
        again = actor._scores(micros)
    metrics = reduce_metrics(actor.train_rollout(shards, [count_tokens(rows) for rows in plan]))

    def largest(first: Any, second: Any) -> float:
        return max((float((a - b).abs().max()) for a, b in zip(first, second, strict=True)), default=0.0)

    return OldChoice(
        largest(again, first_scores), largest(own, replayed), difference.share, difference.max_gap, metrics
    )
