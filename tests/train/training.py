"""Rank functions of test_training: durations, idle ranks, bad rows, off-policy samples, swaps of the reference."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import GrpoConfig, SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import SlimeLikeError
from slime_like.metrics.types import reduce_metrics
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, annotated, make_actor
from tests.train.lifecycle import batch, digest, train
from tests.train.models import count_tokens, make_rows
from tests.train.ranks import RankWorld


class FakeClock:
    """Stand-in for the trainer's module ``time``, whose clock advances only in functions wrapped by ``advance``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds so far."""
        return self.now

    def advance[**P, R](self, seconds: float, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with a duration of ``seconds``."""

        def with_duration(*args: P.args, **kwargs: P.kwargs) -> R:
            self.now += seconds
            return function(*args, **kwargs)

        return with_duration


def durations(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Return the perf metrics of a rollout of two optimizer steps of 1 s each, with scoring passes of 10 s."""
    from slime_like.train.megatron.rank import trainer

    clock, algo = FakeClock(), GrpoConfig(kl_loss_coef=0.1)
    actor = make_actor(world, shared.models["tied"], layout, algo=algo, steps_per_rollout=2)
    with (
        replace_attribute(trainer, "time", clock),
        replace_attribute(trainer, "score_micros", clock.advance(10.0, trainer.score_micros)),
        replace_attribute(actor, "optimizer_step", clock.advance(1.0, actor.optimizer_step)),
    ):
        metrics = train(actor, layout, 1, steps=2)
    return {name: value for name, value in metrics.items() if name.startswith("perf/")}


def steps_or_rollouts(world: RankWorld, shared: Shared, layout: Layout) -> list[tuple[float, str]]:
    """Return mean gradient norm and weights after two unequal batches: as steps of one rollout, and as two rollouts."""
    out: list[tuple[float, str]] = []
    for steps in (2, 1):
        actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig(), steps_per_rollout=steps)
        norms = [train(actor, layout, seed, steps)["train/grad_norm"] for seed in range(1, 3, steps)]
        out.append((float(np.mean(norms)), digest(actor)))
    return out


def off_policy(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Train on rollout logprobs that are the trainer's plus 0.25. One of the micro-batches has another version."""
    actor = make_actor(world, shared.models["tied"], layout)
    micro_batches = batch(1)
    batches: list[PackedBatch] = []
    for i, row in enumerate(micro_batches):
        score = _from_reporter(actor.score(row))
        trained_T = row.loss_weight > 0
        batches.append(
            dataclasses.replace(
                row,
                rollout_logprobs=np.where(trained_T, score + 0.25, 0).astype(np.float32),
                versions=np.where(trained_T, 1 if i == 1 else 0, -1).astype(np.int32),
            )
        )
    shard = batches[actor.rank_info.dp_rank :: layout.dp]
    metrics = actor.train_rollout([shard], [count_tokens(micro_batches)])
    return {
        "metrics": reduce_metrics(metrics),
        "stale": count_tokens(micro_batches[1:2]),
        "all": count_tokens(micro_batches),
    }


def idle_ranks(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Train on two micro-batches. With dp=2, the second rank has one without trained tokens and an empty one."""
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(entropy_coef=0.1))
    micro_batches = batch(1)
    untrained = dataclasses.replace(micro_batches[0], loss_weight=np.zeros_like(micro_batches[0].loss_weight))
    shard = [micro_batches, [untrained, make_rows([], 0)]][actor.rank_info.dp_rank]
    return reduce_metrics(actor.train_rollout([shard], [count_tokens(micro_batches)]))


def bad_rows(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, str]:
    """Return the errors on a token id outside the vocabulary and a NaN advantage, and whether weights changed."""
    actor = make_actor(world, shared.models["tied"], layout)
    micro_batches, before = batch(1), digest(actor)
    out: dict[str, str] = {}
    foreign = dataclasses.replace(micro_batches[0], token_ids=micro_batches[0].token_ids + np.int32(200))
    nan = dataclasses.replace(
        micro_batches[0], advantages=np.full(len(micro_batches[0].sample_ids), np.nan, np.float32)
    )
    for name, bad in {"foreign token": foreign, "nan": nan}.items():
        try:
            actor.train_rollout([[bad]], [count_tokens([bad])])
        except Exception as error:  # noqa: BLE001 (any error is a result)
            out[name] = f"{type(error).__name__}: {error}"
    return out | {"weights": "unchanged" if digest(actor) == before else "changed"}


def another_reference(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Return the metrics of a first rollout whose reference differs from the policy's checkpoint."""
    model = {"ref_checkpoint": str(shared.models["untied"])}
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(kl_loss_coef=0.1), model=model)
    return train(actor, layout, 1)


def rotary_frequencies(world: RankWorld, shared: Shared) -> dict[str, float | str]:
    """Return, per kind of scaling, the difference from transformers' frequencies, or the error if unsupported."""
    import copy

    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from slime_like.train.megatron.families.hf import HFFolder
    from slime_like.train.megatron.model.model import Rotary

    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "longrope": {"factor": 4.0},
    }
    out: dict[str, float | str] = {}
    for kind, parameters in kinds.items():
        hf = copy.deepcopy(HFFolder(shared.models["tied"]).config())
        hf.rope_parameters = {"rope_type": kind, "rope_theta": 5e5, **parameters}
        try:
            frequencies = Rotary(hf, hf.head_dim, torch.device("cpu")).frequencies
        except SlimeLikeError as error:
            out[kind] = f"{type(error).__name__}: {error}"
            continue
        expected: Any = Qwen3RotaryEmbedding(hf).inv_freq
        out[kind] = float((frequencies - expected).abs().max())
    return out


def _from_reporter(score: np.ndarray | None) -> np.ndarray:
    import torch.distributed as dist

    scores: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scores, score)
    (reported_score,) = [s for s in scores if s is not None]
    return reported_score


def reference_swap(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, bool]:
    """Return checks that the reference keeps its initial scores, and that the policy is restored bit for bit."""
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(kl_loss_coef=0.1))
    micro_batch = batch(5)[0]
    first = actor.score(micro_batch)
    train(actor, layout, 1)
    policy_digest, trained_scores = digest(actor), actor.score(micro_batch)
    assert actor.reference is not None
    with actor.swap_weights(actor.reference):
        swapped_digest, swapped_scores = digest(actor), actor.score(micro_batch)
    (micro,) = annotated(actor, [micro_batch])
    assert micro.ref_logprobs is not None
    column = np.where(micro_batch.loss_weight > 0, micro.ref_logprobs.numpy(), 0.0)
    return {
        "scores of the loss are the reference's": first is None
        or bool(np.allclose(column, np.where(micro_batch.loss_weight > 0, first, 0.0), rtol=0, atol=1e-5)),
        "policy restored": digest(actor) == policy_digest,
        "weights differ while swapped": swapped_digest != policy_digest,
        "reference scores kept": first is None or bool(np.array_equal(swapped_scores, first)),  # pyright: ignore[reportArgumentType]
        "policy moved": first is None or not np.array_equal(trained_scores, first),  # pyright: ignore[reportArgumentType]
    }


def scheduling(world: RankWorld, shared: Shared, layout: Layout) -> bool:
    """Return whether a rank that starts with the default policy changes to batch scheduling."""
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        make_actor(world, shared.models["tied"], layout)
        return os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))
