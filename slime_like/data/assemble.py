"""Scored groups -> ``TrainBatch``: advantages, loss weights, optimizer steps, packed rows per dp rank.

Decisions that define the loss:

- **Weights are computed here, once**, over an optimizer step, so that the loss cannot depend on packing,
  micro-batching or dp. ``token_mean``: each trained token 1/N. ``sequence_mean``: each episode 1/E, shared equally by
  its trained tokens. Both sum to 1 over a step. ``dr_grpo``: each trained token 1/(E * max_response_len), as its paper
  defines it; these sum to (mean length / max_response_len), not to 1, and are also independent of packing.
- **Failed and aborted samples** stay in the batch with weight 0, so that its shape does not depend on them; they
  count in no baseline and no denominator. Truncated samples are trained on unless ``mask_truncated``, which removes
  their weight but leaves their rewards in the group's baseline.
- **Baselines are per episode.** An episode that gave several samples counts once, with the mean of their rewards.
- **Groups are not split between optimizer steps** if there are at least as many groups as steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slime_like.batch import PackedBatch, StepBatch, TrainBatch
from slime_like.data.columns import UNTRAINED, SequenceColumns, column, filler, rows_of
from slime_like.data.overlong import OverlongPenalty
from slime_like.data.pack import pack_equal
from slime_like.errors import ConfigError, DataError
from slime_like.interfaces import GroupAdvantage
from slime_like.types import Sample, SampleGroup, Status


@dataclass(frozen=True, slots=True)
class AssembleSpec:
    """Settings of batch assembly. ``group_advantage`` is None if advantages are per token or not needed."""

    group_advantage: GroupAdvantage | None
    aggregation: str  # token_mean | sequence_mean | dr_grpo
    steps_per_rollout: int
    dp: int
    max_tokens_per_rank: int
    max_response_len: int
    mask_truncated: bool = False
    mask_offpolicy: bool = False  # of samples with several versions, train only on tokens of the newest
    overlong: OverlongPenalty | None = None  # None: no penalty


def assemble(groups: Sequence[SampleGroup], spec: AssembleSpec, rollout_id: int) -> TrainBatch:
    """Return all optimizer steps of one rollout.

    Without groups (dropped by filters, or carried over until they fill a rollout) there are no steps.
    Raises ``ConfigError`` if a step has fewer samples than dp ranks, ``DataError`` if a step has
    no token to train on.
    """
    if not groups:
        return TrainBatch(rollout_id, ())
    groups = groups if spec.overlong is None else spec.overlong.shaped(groups)
    masked = frozenset({Status.TRUNCATED} if spec.mask_truncated else ())
    newest = spec.mask_offpolicy
    grouped = [[column(s, advantage, masked, newest) for s, advantage in _advantages(group, spec)] for group in groups]
    steps = split_steps(grouped, spec.steps_per_rollout, spec.dp)
    names = [f"rollout {rollout_id}, optimizer step {i}" for i in range(len(steps))]
    return TrainBatch(rollout_id, tuple(_step(columns, spec, name) for columns, name in zip(steps, names, strict=True)))


def _advantages(group: SampleGroup, spec: AssembleSpec) -> list[tuple[Sample, float | None]]:
    """Return each sample with its advantage: 0 if untrained, None if the trainer ranks compute it."""
    if spec.group_advantage is None:
        return [(sample, None) for sample in group.samples]
    rewards: dict[int, list[float]] = {}
    for sample in group.samples:
        assert sample.reward is not None, f"sample {sample.sample_id} was not scored"
        if sample.status not in UNTRAINED:
            rewards.setdefault(sample.episode_id, []).append(sample.reward.score)
    rewards_G = np.array([np.mean(scores) for scores in rewards.values()], dtype=np.float32)
    values = dict(zip(rewards, spec.group_advantage(rewards_G).tolist(), strict=True)) if rewards else {}
    return [(s, values[s.episode_id] if s.status not in UNTRAINED else 0.0) for s in group.samples]


def split_steps(groups: Sequence[Sequence[SequenceColumns]], steps: int, dp: int) -> list[list[SequenceColumns]]:
    """Return the columns of each optimizer step, in input order.

    Steps are cut at the group boundaries nearest to equal numbers of samples. Only if a step would have fewer
    samples than dp ranks (few or very uneven groups), groups are split.
    """
    sizes = [len(group) for group in groups]
    total = sum(sizes)
    if total < steps * dp:
        raise ConfigError(
            f"{total} samples cannot feed loop.steps_per_rollout={steps} optimizer steps on dp={dp} trainer ranks: "
            f"each step needs a sample per rank; raise rollout.batch_size or rollout.n_samples_per_prompt, or lower "
            f"loop.steps_per_rollout or placement.actor_num_gpus_per_node"
        )
    flat = [item for group in groups for item in group]
    targets = [total * i / steps for i in range(steps + 1)]
    edges = np.concatenate([[0], np.cumsum(sizes)])
    cuts = [int(edges[np.argmin(np.abs(edges - target))]) for target in targets]
    if min(np.diff(cuts)) < dp:
        cuts = [total * i // steps for i in range(steps + 1)]
    return [flat[a:b] for a, b in pairwise(cuts)]


def _step(columns: Sequence[SequenceColumns], spec: AssembleSpec, name: str) -> StepBatch:
    num_tokens = sum(c.num_trained for c in columns)
    if num_tokens == 0:
        counts = Counter(str(c.sample.status) for c in columns)
        statuses = ", ".join(f"{status} {n}" for status, n in sorted(counts.items()))
        raise DataError(
            f"{name}: none of its {len(columns)} samples has a token to train on ({statuses}); "
            f"look at the engines' logs, at reward/timeouts and at rollout.request_deadline_s"
            + ("; algo.mask_truncated=true leaves truncated samples out" if spec.mask_truncated else "")
        )
    weights = _token_weights(columns, spec)
    lengths = [len(c.sample.token_ids) for c in columns]
    blank = filler(min(columns, key=lambda c: len(c.sample.token_ids)))
    packed = pack_equal(lengths, spec.dp, spec.max_tokens_per_rank)

    def row(indices: Sequence[int]) -> PackedBatch:
        if not indices:
            return rows_of([blank], [0.0])
        return rows_of([columns[i] for i in indices], [weights[i] for i in indices])

    return StepBatch(rows=tuple(tuple(row(indices) for indices in rank) for rank in packed), num_tokens=num_tokens)


def _token_weights(columns: Sequence[SequenceColumns], spec: AssembleSpec) -> list[float]:
    """Return the weight per trained token of each sequence."""
    tokens: Counter[tuple[int, int]] = Counter()
    for c in columns:
        tokens[c.episode] += c.num_trained
    episodes = sum(1 for n in tokens.values() if n)
    match spec.aggregation:
        case "token_mean":
            return [1.0 / tokens.total()] * len(columns)
        case "sequence_mean":
            return [1.0 / (episodes * max(tokens[c.episode], 1)) for c in columns]
        case "dr_grpo":
            return [1.0 / (episodes * spec.max_response_len)] * len(columns)
        case other:
            raise ConfigError(f"algo.aggregation={other!r} is not one of token_mean, sequence_mean, dr_grpo")
