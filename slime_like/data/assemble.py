"""Assembly of a ``TrainBatch``: advantages, loss weights, optimizer steps, packed micro-batches per dp rank.

Decisions that define the loss:

- **Weights are computed here, once**, over a whole optimizer step, so that the loss cannot depend on packing,
  micro-batching or dp. In a step with N trained tokens in E episodes, ``token_mean`` gives each trained token 1/N, and
  ``sequence_mean`` gives each episode 1/E, shared equally by its trained tokens. The weights of either sum to 1 over a
  step. ``dr_grpo`` gives each trained token 1/(E * max_response_len), as its paper defines it; these weights sum to
  (mean length / max_response_len), not to 1, and are also independent of packing.
- **Failed and aborted samples** (``types.UNTRAINED``) stay in the batch with weight 0, so that its shape is unchanged.
  They enter no baseline and no denominator. Truncated samples are trained on unless ``mask_truncated`` sets their weight to
  0; their rewards enter the group's baseline in either case.
- **Baselines are per episode.** An episode with several samples counts once, with the mean of their rewards.
- **Groups are not split between optimizer steps**, unless a step would otherwise have fewer samples than dp ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.algo_interfaces import GroupAdvantage
from slime_like.batch import PackedBatch, StepBatch, TrainBatch
from slime_like.data.overlong import OverlongPenalty
from slime_like.data.routing import RoutingShape, with_routing
from slime_like.errors import ConfigError, DataError, EngineError
from slime_like.types import F32, I32, UNTRAINED, Reward, Sample, SampleGroup, Source, Span, Status

# Packing. A row is the list of the indices of the sequences in one micro-batch.


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of ``lengths`` in ``parts`` lists, each ascending, with nearly equal sums of lengths.

    Each index, in descending order of length, is assigned to the list with the smallest sum (Graham 1969, LPT: the
    largest sum is at most 4/3 of the optimum). The result is deterministic: of equal lengths, the one with the lower
    index is assigned first; of equal sums, the list with fewer indices is chosen, then the first. No list is empty if
    there are at least ``parts`` lengths.

    Example: ``balance([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]``.
    """
    indices_of_part: list[list[int]] = [[] for _ in range(parts)]
    # The number of assigned lengths breaks ties before the index, so that zero lengths are distributed too.
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, num_assigned, part = heapq.heappop(heap)
        indices_of_part[part].append(index)
        heapq.heappush(heap, (load + lengths[index], num_assigned + 1, part))
    return [sorted(part) for part in indices_of_part]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the indices of ``lengths`` in rows of at most ``budget`` tokens.

    A sequence of more than ``budget`` tokens has a row of its own. Each index, longest first, is put into the first row
    with enough space. If no sequence is too long, there are at most 11/9 * (fewest possible rows) + 1 rows (Yue 1991).

    Example: ``first_fit_decreasing([3, 9, 4, 5], 8) == [[1], [0, 3], [2]]``.
    """
    rows: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = np.flatnonzero(free[: len(rows)] >= lengths[index])
        if len(fits):
            row = int(fits[0])
        else:
            row = len(rows)
            rows.append([])
            free[row] = max(budget, lengths[index])
        rows[row].append(index)
        free[row] -= lengths[index]
    return [sorted(row) for row in rows]


def split_to(rows: list[list[int]], lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Split ``rows`` into ``num_rows`` rows, always halving the row with the most tokens among rows of several sequences.

    The result has fewer rows if no row with several sequences is left.
    """
    rows = [list(row) for row in rows]
    while len(rows) < num_rows:
        divisible = [i for i, row in enumerate(rows) if len(row) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda i: (sum(lengths[j] for j in rows[i]), -i))
        row_to_split = rows.pop(largest)
        halves = balance([lengths[j] for j in row_to_split], 2)
        rows[largest:largest] = [[row_to_split[j] for j in half] for half in halves]
    return rows


def pack_equal(lengths: Sequence[int], dp: int, budget: int) -> list[list[list[int]]]:
    """Return ``[dp][m]`` rows of sequence indices, where m is the largest number of rows that a dp rank needs.

    A row contains at most ``budget`` tokens; a sequence of more than ``budget`` tokens has a row of its own. Every rank
    must run the same number of micro-batches. If a rank has fewer than m rows, rows with several sequences are
    therefore split, which costs less than an idle micro-batch. If there are still too few, empty rows are added for the
    caller to fill.
    """
    ranks: list[list[list[int]]] = []
    for part in balance(lengths, dp):
        local = first_fit_decreasing([lengths[i] for i in part], budget)
        ranks.append([[part[i] for i in row] for row in local])
    m = max(len(rows) for rows in ranks)
    packed = [split_to(rows, lengths, m) for rows in ranks]
    return [rows + [[] for _ in range(m - len(rows))] for rows in packed]


FILLER_ID = -1  # sample_id of a zero-weight sequence, which fills a micro-batch of a rank with too few sequences


@dataclass(frozen=True, slots=True)
class AssembleSpec:
    """Settings of batch assembly. ``group_advantage`` is None if no advantage is computed from a group's rewards."""

    group_advantage: GroupAdvantage | None
    aggregation: str  # token_mean | sequence_mean | dr_grpo
    steps_per_rollout: int
    dp: int
    max_tokens_per_rank: int
    max_response_len: int
    mask_truncated: bool = False
    mask_offpolicy: bool = False  # in samples with several versions, train only on tokens of the newest version
    overlong: OverlongPenalty | None = None  # None: no penalty
    routing: RoutingShape | None = None  # shape of the routed experts that the trainer replays; None if it replays none


@dataclass(frozen=True, slots=True)
class SequenceColumns:
    """Columns of one sequence of L tokens, ready for packing."""

    sample: Sample
    advantage: float | None
    trained: npt.NDArray[np.bool_]  # [L], tokens in the loss
    versions: I32  # [L], weight version that sampled the token, -1 if not sampled
    rollout_logprobs: F32  # [L]
    num_trained: int

    @property
    def episode(self) -> tuple[int, int]:
        """Return (group id, episode id). Means over sequences count an episode once, even if it has several samples."""
        return self.sample.group_id, self.sample.episode_id


def assemble(groups: Sequence[SampleGroup], spec: AssembleSpec, rollout_id: int) -> TrainBatch:
    """Return all optimizer steps of one rollout.

    ``groups`` may be empty, if filters dropped all groups or all are carried over to the next rollout; there are then no
    steps. Raises ``ConfigError`` if the aggregation is unknown, or if there are fewer than ``steps * dp`` samples;
    ``DataError`` if a step has no token to train on; ``EngineError`` if log-probabilities or routed experts of trained
    tokens are missing, if routed experts do not fit the routing of ``spec``, or if the extras of samples have different names or
    wrong sizes; ``UserCodeError`` if a user's group advantage fails.
    """
    if not groups:
        return TrainBatch(rollout_id, ())
    groups = groups if spec.overlong is None else spec.overlong.penalise(groups)
    groups = groups if spec.routing is None else with_routing(groups, spec.routing)
    masked_statuses = frozenset({Status.TRUNCATED} if spec.mask_truncated else ())
    newest_only = spec.mask_offpolicy
    grouped = [
        [column(s, adv, masked_statuses, newest_only) for s, adv in _advantages(group, spec)] for group in groups
    ]
    steps = split_steps(grouped, spec.steps_per_rollout, spec.dp)
    names = [f"rollout {rollout_id}, optimizer step {i}" for i in range(len(steps))]
    return TrainBatch(rollout_id, tuple(_step(columns, spec, name) for columns, name in zip(steps, names, strict=True)))


def _advantages(group: SampleGroup, spec: AssembleSpec) -> list[tuple[Sample, float | None]]:
    """Return each sample with the advantage of its episode, 0 if untrained. All are None if ``spec`` has no group advantage."""
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

    Steps are cut at the group boundaries nearest to equal numbers of samples. Groups are split only if a step
    would otherwise have fewer samples than dp ranks (few or very uneven groups). Raises ``ConfigError`` if there are fewer
    than ``steps * dp`` samples.
    """
    sizes = [len(group) for group in groups]
    num_samples = sum(sizes)
    if num_samples < steps * dp:
        raise ConfigError(
            f"{num_samples} samples cannot feed loop.steps_per_rollout={steps} optimizer steps on dp={dp} trainer ranks: "
            f"each step needs a sample per rank; raise rollout.batch_size or rollout.n_samples_per_prompt, or lower "
            f"loop.steps_per_rollout or placement.actor_num_gpus_per_node"
        )
    flat = [item for group in groups for item in group]
    targets = [num_samples * i / steps for i in range(steps + 1)]
    edges = np.concatenate([[0], np.cumsum(sizes)])
    cuts = [int(edges[np.argmin(np.abs(edges - target))]) for target in targets]
    if min(np.diff(cuts)) < dp:
        cuts = [num_samples * i // steps for i in range(steps + 1)]
    return [flat[a:b] for a, b in pairwise(cuts)]


def _step(columns: Sequence[SequenceColumns], spec: AssembleSpec, name: str) -> StepBatch:
    num_tokens = sum(c.num_trained for c in columns)
    if num_tokens == 0:
        counts = Counter(str(c.sample.status) for c in columns)
        statuses = ", ".join(f"{status} {n}" for status, n in sorted(counts.items()))
        raise DataError(
            f"{name}: none of its {len(columns)} samples has a token to train on ({statuses}); "
            f"check the engines' logs, reward/timeouts and rollout.request_deadline_s"
            + ("; algo.mask_truncated=true leaves truncated samples out" if spec.mask_truncated else "")
        )
    weights = _token_weights(columns, spec)
    lengths = [len(c.sample.token_ids) for c in columns]
    blank = filler(min(columns, key=lambda c: len(c.sample.token_ids)))
    packed = pack_equal(lengths, spec.dp, spec.max_tokens_per_rank)

    def micro_batch(indices: Sequence[int]) -> PackedBatch:
        if not indices:
            return pack_columns([blank], [0.0])
        return pack_columns([columns[i] for i in indices], [weights[i] for i in indices])

    return StepBatch(tuple(tuple(micro_batch(indices) for indices in rank) for rank in packed), num_tokens)


def _token_weights(columns: Sequence[SequenceColumns], spec: AssembleSpec) -> list[float]:
    """Return, for each sequence, the weight of each of its trained tokens.

    Raises ``ConfigError`` if the aggregation is unknown.
    """
    num_tokens: Counter[tuple[int, int]] = Counter()
    for c in columns:
        num_tokens[c.episode] += c.num_trained
    num_episodes = sum(1 for n in num_tokens.values() if n)
    match spec.aggregation:
        case "token_mean":
            return [1.0 / num_tokens.total()] * len(columns)
        case "sequence_mean":
            return [1.0 / (num_episodes * max(num_tokens[c.episode], 1)) for c in columns]
        case "dr_grpo":
            return [1.0 / (num_episodes * spec.max_response_len)] * len(columns)
        case other:
            raise ConfigError(f"algo.aggregation={other!r} is not one of token_mean, sequence_mean, dr_grpo")


def column(
    sample: Sample, advantage: float | None, masked: frozenset[Status] = frozenset(), newest_only: bool = False
) -> SequenceColumns:
    """Return the per-token arrays of a sample.

    A sample that failed, was aborted or has a status in ``masked`` is not trained on. With ``newest_only``, only tokens of
    the sample's newest weight version are trained on. Raises ``EngineError`` if a trained token has no finite log-probability.
    """
    lengths = [span.stop - span.start for span in sample.spans]
    sampled = np.repeat([span.source is Source.MODEL for span in sample.spans], lengths)
    versions = np.repeat([span.version if span.source is Source.MODEL else -1 for span in sample.spans], lengths)
    trained = sampled & (sample.status not in (*UNTRAINED, *masked))
    if newest_only:
        trained &= versions == versions.max(initial=-1)
    trained[:1] = False  # no token precedes the first one, so nothing predicts it
    num_unknown = int((~np.isfinite(sample.logprobs[trained])).sum())
    if num_unknown:
        raise EngineError(
            f"sample {sample.sample_id} of group {sample.group_id}: {num_unknown} of its {int(trained.sum())} sampled "
            f"tokens have no finite log-probability; a generate function must keep the engine's log-probability of every Source.MODEL token"
        )
    logprobs = np.where(sampled, np.nan_to_num(sample.logprobs, nan=0.0), 0.0).astype(np.float32)
    return SequenceColumns(sample, advantage, trained, versions.astype(np.int32), logprobs, int(trained.sum()))


def filler(shortest: SequenceColumns) -> SequenceColumns:
    """Return a sequence of at most two tokens with weight 0, for a rank with fewer sequences than there are micro-batches."""
    length = min(2, len(shortest.sample.token_ids))
    sample = replace(
        shortest.sample,
        sample_id=FILLER_ID,
        token_ids=shortest.sample.token_ids[:length],
        logprobs=np.zeros(length, dtype=np.float32),
        spans=(Span(0, length, Source.PROMPT),),
        reward=Reward(0.0),
        extras={name: value[:length] for name, value in shortest.sample.extras.items()},
    )
    return column(sample, None if shortest.advantage is None else 0.0)


def pack_columns(columns: Sequence[SequenceColumns], token_weights: Sequence[float]) -> PackedBatch:
    """Return one packed micro-batch; ``token_weights[i]`` is the weight of each trained token of sequence i.

    Raises ``EngineError`` unless all sequences have the same extras, with one entry per token.
    """
    samples = [c.sample for c in columns]
    lengths = np.array([len(s.token_ids) for s in samples], dtype=np.int64)
    trained = np.concatenate([c.trained for c in columns])
    weights = np.repeat(np.array(token_weights, dtype=np.float32), lengths)
    advantages = [c.advantage for c in columns if c.advantage is not None]
    return PackedBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]).astype(np.int32, copy=False),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.where(trained, weights, np.float32(0.0)),
        versions=np.concatenate([c.versions for c in columns]),
        rollout_logprobs=np.concatenate([c.rollout_logprobs for c in columns]),
        rewards=np.array([s.reward.score if s.reward is not None else 0.0 for s in samples], dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32) if advantages else None,
        sample_ids=np.array([s.sample_id for s in samples], dtype=np.int64),
        extras=_extras(samples),
    )


def _extras(samples: Sequence[Sample]) -> dict[str, npt.NDArray[Any]]:
    """Return the per-token extras of all sequences, concatenated.

    Raises ``EngineError`` unless all sequences have the same extras, with one entry per token.
    """
    names = set(samples[0].extras)
    for sample in samples:
        if set(sample.extras) != names:
            raise EngineError(
                f"samples {samples[0].sample_id} and {sample.sample_id} have different extras: "
                f"{sorted(names)} and {sorted(sample.extras)}; a generate function must give every sample the same extras"
            )
        for name, value in sample.extras.items():
            if len(value) != len(sample.token_ids):
                raise EngineError(
                    f"sample {sample.sample_id}: extras[{name!r}] has {len(value)} entries for {len(sample.token_ids)} "
                    f"tokens; extras need one entry per token"
                )
    return {name: np.concatenate([s.extras[name] for s in samples]) for name in sorted(names)}
