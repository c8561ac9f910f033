"""Check after each push: engine and trainer score the same sequences and must agree.

The check works at any staleness, since it compares the current weights of engine and trainer, and detects a push that
had no effect. The engine is checked in two ways: it scores each sequence as a prefill without cache, and it samples a
few tokens after a cached prefix of the sequence, as in a rollout. If a push left keys and values of older weights in the
cache, only the second result differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_like.batch import PackedBatch
from slime_like.data.routing import RoutingDifference, routing_column
from slime_like.errors import ConsistencyError, EngineLost
from slime_like.interfaces import DataSource
from slime_like.metrics.types import Max, Mean, Metric
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.engine_slot import EngineSlot
from slime_like.types import F32, I32, RoutedExperts, SampleGroup

NUM_DECODED = 8  # tokens of a continuation: prefill samples the first, decode steps the others
MAX_PREFIX_LEN = 256  # limit of tokens before a continuation, as the trainer scores the continuations of all engines


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Tokens [L] that the trainer scores, and the experts [L - 1, layers, experts per token] that it replays, if any."""

    token_ids: I32
    experts: RoutedExperts | None = None

    @property
    def identity(self) -> bytes:
        """Key of the tokens and experts: the trainer scores sequences with equal keys once."""
        return self.token_ids.tobytes() + (b"" if self.experts is None else self.experts.tobytes())


@dataclass(frozen=True, slots=True)
class Continuation:
    """Sequence of L tokens. The engine sampled the last R of them."""

    token_ids: I32  # [L]
    logprobs: F32  # [R]
    num_cached: int  # prefix tokens found in the engine's cache
    experts: RoutedExperts | None = None  # [L - 1, layers, experts per token]

    @property
    def sequence(self) -> ScoredSequence:
        """Tokens and experts for the trainer to score."""
        return ScoredSequence(self.token_ids, self.experts)


@dataclass(frozen=True, slots=True)
class ProbeScores:
    """An engine's scores of S sequences under one weight version, and continuations that it sampled after prefixes of them."""

    version: int
    token_ids: tuple[I32, ...]  # S x [L]
    logprobs: tuple[F32, ...]  # S x [L - 1], of tokens 1 .. L - 1
    continuations: tuple[Continuation, ...] = ()
    experts: tuple[RoutedExperts | None, ...] = ()  # S x [L - 1, layers, experts per token]; () if nothing is replayed

    @property
    def sequences(self) -> tuple[ScoredSequence, ...]:
        """Scored sequences, with their experts."""
        experts = self.experts or (None,) * len(self.token_ids)
        return tuple(ScoredSequence(*pair) for pair in zip(self.token_ids, experts, strict=True))

    def without_experts(self) -> ProbeScores:
        """Return a copy that contains no experts to replay."""
        return replace(self, experts=(), continuations=tuple(replace(c, experts=None) for c in self.continuations))


class EngineProbe:
    """Probe of a pool's engines: it keeps sequences of the newest rollout, and lets the engines score and continue them."""

    def __init__(
        self, pool: EnginePool, source: DataSource, *, num_sequences: int, temperature: float, max_context_len: int
    ) -> None:
        self._pool, self._source = pool, source
        self._num_sequences, self._temperature, self._max_context_len = num_sequences, temperature, max_context_len
        self._sequences: tuple[I32, ...] = ()

    async def scores(self, version: int) -> tuple[ProbeScores, ...]:
        """Return the scores and continuations of every engine that serves the weights of ``version`` or waits for their probe.

        The result is empty if no sequence can be scored. Raises ``EngineLost`` if no such engine remains.
        """
        if not self._sequences:
            self.remember([])
        if not self._sequences:  # one-token prompts have nothing to score; the first rollout has longer sequences
            return ()
        results = await asyncio.gather(
            *(self._score(slot, version) for slot in self._pool.slots if not slot.is_restarting)
        )
        if not (probe_scores := [scores for scores in results if scores is not None]):
            raise EngineLost(f"no remaining engine has the weights of version {version}")
        return tuple(probe_scores)

    def remember(self, groups: Sequence[SampleGroup]) -> None:
        """Keep sequences of a new rollout for the probe: the first sample of each group, if it can be scored.

        Only the first ``num_sequences`` such samples are kept. If there are none, keep the earlier sequences or, if there
        are none of these either, prompts of the data source. The position of the data source does not change.
        """
        sequences = [group.samples[0].token_ids for group in groups if group.samples and self._can_score(group)]
        sequences = sequences[: self._num_sequences]
        if not sequences and not self._sequences:
            state = self._source.state()
            sequences = [p.token_ids for p in self._source.next(self._num_sequences) if len(p.token_ids) > 1]
            self._source.load_state(state)
        if sequences:
            self._sequences = tuple(np.asarray(ids, dtype=np.int32) for ids in sequences)

    async def _score(self, slot: EngineSlot, version: int) -> ProbeScores | None:
        """Return one engine's scores.

        Return None if it neither serves nor waits for the probe of ``version``, or is lost or removed during the call.
        """
        engine = slot.client
        if engine not in self._pool.router.engines and slot.loaded_version != version:
            return None
        request = probe_engine(engine, version, self._sequences, self._temperature, self._max_context_len)
        return await self._pool.call(slot, engine, request)

    def _can_score(self, group: SampleGroup) -> bool:
        """Return whether a group's first sample has tokens to score and leaves room for one more token."""
        return 1 < len(group.samples[0].token_ids) < self._max_context_len


async def probe_engine(
    engine: EngineClient, version: int, sequences: Sequence[I32], temperature: float, max_context_len: int
) -> ProbeScores:
    """Return the scores and continuations of an engine that serves ``version``.

    Scoring does not read the KV cache. It adds entries for tokens that the cache lacks, and keeps existing ones. A continuation
    therefore reads the same entries as a rollout would, including any that a push left from older weights.
    """
    scored_sequences = await engine.score_with_experts(sequences, temperature)
    prefixes = _prefixes(sequences, max_context_len)
    completions = await engine.continuations(prefixes, temperature, NUM_DECODED) if prefixes else []
    continuations = (
        Continuation(
            np.concatenate([ids, completion.token_ids]),
            completion.logprobs,
            completion.cached_tokens,
            completion.routed_experts,
        )
        for ids, completion in zip(prefixes, completions, strict=True)
        if len(completion.token_ids)
    )
    logprobs, experts = zip(*scored_sequences, strict=True)
    returned_experts = tuple(e for e in experts if e is not None)  # experts of all sequences, or of none
    return ProbeScores(version, tuple(sequences), logprobs, tuple(continuations), returned_experts)


def _prefixes(sequences: Sequence[I32], max_context_len: int) -> list[I32]:
    """Return prefixes of the sequences that leave room for a continuation; empty if ``max_context_len`` is too short."""
    longest = min(MAX_PREFIX_LEN, max_context_len - NUM_DECODED - 1)
    return [ids[:longest] for ids in sequences] if longest > 0 else []


class TrainerScores:
    """The trainer's log-probabilities of every sequence that engines scored or sampled."""

    def __init__(self, engines: Sequence[ProbeScores], max_tokens: int) -> None:
        """``max_tokens`` limits the tokens of a packed row, unless a single sequence exceeds it."""
        sequences = [s for scores in engines for s in (*scores.sequences, *(c.sequence for c in scores.continuations))]
        self._sequences = {sequence.identity: sequence for sequence in sequences}
        self._columns: Mapping[bytes, F32] = {}
        self.rows = [to_rows(part) for part in _parts(list(self._sequences.values()), max_tokens)]

    def set_columns(self, columns_T: Sequence[F32]) -> None:
        """Store the trainer's log-probabilities: for each of ``rows``, an array [T] with one per token."""
        columns = [
            column
            for rows, column_T in zip(self.rows, columns_T, strict=True)
            for column in np.split(column_T, rows.cu_seqlens[1:-1])
        ]
        self._columns = dict(zip(self._sequences, columns, strict=True))

    def logprobs_of(self, sequence: ScoredSequence) -> F32:
        """Return the trainer's log-probabilities [L - 1] of tokens 1 .. L - 1 of a sequence."""
        return self._columns[sequence.identity][1:]


def _parts(sequences: Sequence[ScoredSequence], max_tokens: int) -> list[list[ScoredSequence]]:
    """Split ``sequences`` into consecutive parts of at most ``max_tokens`` tokens; a longer sequence is a part of its own."""
    parts: list[list[ScoredSequence]] = [[]]
    for sequence in sequences:
        if parts[-1] and sum(len(s.token_ids) for s in (*parts[-1], sequence)) > max_tokens:
            parts.append([])
        parts[-1].append(sequence)
    return parts


def to_rows(sequences: Sequence[ScoredSequence]) -> PackedBatch:
    """Return the sequences as one packed row for the trainer."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    columns = [routing_column(s.experts, n) for s, n in zip(sequences, lengths, strict=True)]
    num_tokens, num_sequences = sum(lengths), len(lengths)
    return PackedBatch(
        token_ids=np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.ones(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, -1, dtype=np.int32),
        rollout_logprobs=np.zeros(num_tokens, dtype=np.float32),
        rewards=np.zeros(num_sequences, dtype=np.float32),
        advantages=None,
        sample_ids=np.arange(num_sequences, dtype=np.int64),
        extras={name: np.concatenate([column[name] for column in columns]) for name in columns[0]},
    )


def check(scores: ProbeScores, trainer: TrainerScores, version: int, tolerance: float) -> tuple[Metric, ...]:
    """Return metrics ``probe/*`` of one engine after the push of ``version``.

    Raises ``ConsistencyError`` if ``scores`` are those of another version, or if any log-probability of engine and trainer
    differs by more than ``tolerance`` or is not finite.
    """
    if scores.version != version:
        raise ConsistencyError(
            f"an engine serves weights of version {scores.version} after the push of version {version}"
        )
    prefill = prefill_differences(scores, trainer)
    _check_differences(
        prefill,
        version,
        tolerance,
        f"sequences: {len(scores.token_ids)}, scored at once",
        "The engine's weights differ from the trainer's, or it computes another distribution from the same weights",
    )
    metrics = [
        Max("probe/logprob_abs_diff_max", float(prefill.max())),
        Mean("probe/logprob_abs_diff_mean", float(prefill.mean())),
    ]
    differences = [
        np.abs(trainer.logprobs_of(c.sequence)[-len(c.logprobs) :] - c.logprobs) for c in scores.continuations
    ]
    if differences:
        num_cached = sum(c.num_cached for c in scores.continuations)
        num_prefix = sum(len(c.token_ids) - len(c.logprobs) for c in scores.continuations)
        decode = np.concatenate(differences)
        _check_differences(
            decode,
            version,
            tolerance,
            f"continuations: {len(differences)}, sampled after {num_prefix} prefix tokens, {num_cached} of them cached",
            "Prefill scores of the same weights agree: the engine reused keys and values of older weights (its cache was not "
            "flushed), or decode and prefill compute different distributions",
        )
        metrics += [
            Max("probe/decode_logprob_abs_diff_max", float(decode.max())),
            Mean("probe/decode_logprob_abs_diff_mean", float(decode.mean())),
            Mean("probe/prefix_cache_hit_rate", num_cached / num_prefix),
        ]
    return tuple(metrics)


def layer_metrics(scores: ProbeScores, trainer: TrainerScores, kind: str) -> tuple[Metric, ...]:
    """Return ``probe/logprob_abs_diff_*/<kind>``, which compare the engine with a variant of the trainer's computation.

    ``kind`` names the variant: the kind of layers that it computes in float64 ("all" for every kind), or ``OWN_EXPERTS`` if it
    chooses experts itself instead of replaying those of the engine.
    """
    difference = prefill_differences(scores, trainer)
    return (
        Max(f"probe/logprob_abs_diff_max/{kind}", float(difference.max())),
        Mean(f"probe/logprob_abs_diff_mean/{kind}", float(difference.mean())),
    )


def prefill_differences(scores: ProbeScores, trainer: TrainerScores) -> F32:
    """Return |log-probability difference| of trainer and engine for all tokens but the first of each sequence of ``scores``."""
    return np.abs(np.concatenate([trainer.logprobs_of(s) for s in scores.sequences]) - np.concatenate(scores.logprobs))


def check_experts(difference: RoutingDifference, version: int, tolerance: float) -> tuple[Metric, ...]:
    """Return metrics that compare the experts of engine and trainer for the probe's tokens.

    Raises ``ConsistencyError`` if the engine chose experts that the trainer's router ranks below its own by more than
    ``tolerance``. Experts within ``tolerance`` are nearly tied: rounding decides between them.
    """
    if not difference.max_gap <= tolerance:
        raise ConsistencyError(
            f"after the push of version {version} engine and trainer choose different experts for {difference.share:.2%} of the "
            f"probe's tokens, and the trainer's router prefers its own by up to {difference.max_gap:.3g}, above "
            f"weights.probe_tolerance={tolerance:g}: these are not ties that rounding decides. The engine's routers differ from "
            "the trainer's, or the experts were returned for other tokens; no step was trained after this push"
        )
    return difference.metrics("probe")


def _check_differences(difference: F32, version: int, tolerance: float, description: str, cause: str) -> None:
    max_difference = float(difference.max()) if np.isfinite(difference).all() else float("inf")
    if not max_difference <= tolerance:
        raise ConsistencyError(
            f"after the push of version {version} engine and trainer disagree: largest |log-probability difference| {max_difference:.3g}"
            f" "
            f"over {difference.size} tokens ({description}), above weights.probe_tolerance={tolerance:g}. {cause}; no step was "
            f"trained after this push"
        )
