"""Record the engine calls of a group, so that its generate function can be run again and continue them.

A ``SampleStore`` holds the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_like.interfaces import Completion
from slime_like.store.columns import PROMPT_TOKEN, TOOL_TOKEN, TokenColumns, context_columns, join, sampled_columns
from slime_like.store.store import Batch, SampleStore, StoreRow
from slime_like.types import I32

ABORT = "abort"  # finish reason of a completion that may be continued


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Snapshot of an ``EngineCall``: views of its rows."""

    num_prompt_tokens: int
    seeds: tuple[int, ...]
    sequences: tuple[TokenColumns, ...]  # per seed: the prompt and the tokens sampled so far
    finishes: tuple[str, ...]

    @property
    def token_ids(self) -> I32:
        """Prompt of the call."""
        return self.sequences[0].token_ids[: self.num_prompt_tokens]

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Tokens sampled so far, per seed."""
        return tuple(
            _completion(columns, self.num_prompt_tokens, finish)
            for columns, finish in zip(self.sequences, self.finishes, strict=True)
        )


class EngineCall:
    """One ``Engine.generate`` call.

    Each completion is a row of the store: a fork of the prompt's row, to which replies append the sampled tokens.
    """

    def __init__(self, store: SampleStore, token_ids: I32, seeds: Sequence[int]) -> None:
        self.seeds = tuple(seeds)
        self.num_prompt_tokens = len(token_ids)
        self._store = store
        self._rows = _fork_prompt(store, token_ids, len(seeds))
        self._finishes = [ABORT] * len(seeds)
        self._usage = [(0, 0)] * len(seeds)  # per seed: prompt and cached tokens, summed over its requests
        self.oldest_version: int | None = None  # oldest version of the sampled tokens; None before any token is sampled

    def unfinished_indices(self) -> list[int]:
        """Return the indices of completions that may be continued."""
        return [index for index, finish in enumerate(self._finishes) if finish == ABORT]

    def sequence(self, index: int) -> TokenColumns:
        """Return views of the prompt and the tokens of completion ``index`` sampled so far."""
        return self._store.columns(self._rows[index])

    def num_sampled(self, index: int) -> int:
        """Return the number of tokens of completion ``index`` sampled so far."""
        return self._store.length(self._rows[index]) - self.num_prompt_tokens

    def append(self, indices: Sequence[int], parts: Sequence[Completion]) -> None:
        """Append ``parts[i]`` to completion ``indices[i]``, with the log-probability and version of each token.

        ``parts[i].routed_experts`` are those of the prompt and of all sampled tokens but the last. They replace the row's
        experts, because the engine reports the experts of cached tokens too; None keeps the row's experts.
        """
        self._store.append_batch(
            Batch(
                rows=np.array([self._rows[index] for index in indices], dtype=np.int64),
                counts=np.array([len(part.token_ids) for part in parts], dtype=np.int64),
                columns=join(sampled_columns(part.token_ids, part.logprobs, part.versions) for part in parts),
                experts=tuple(part.routed_experts for part in parts),
                is_finished=np.array([part.finish != ABORT for part in parts]),
            )
        )
        for index, part in zip(indices, parts, strict=True):
            self._finishes[index] = part.finish
            prompt, cached = self._usage[index]
            self._usage[index] = (prompt + part.prompt_tokens, cached + part.cached_tokens)
        versions = [version for part in parts for _, _, version in part.versions]
        if self.oldest_version is not None:
            versions.append(self.oldest_version)
        self.oldest_version = min(versions, default=None)

    def completions(self) -> tuple[Completion, ...]:
        """Return the completions. The arrays of each are views of its row in the store (``Completion.row``)."""
        return tuple(
            replace(
                _completion(self.sequence(index), self.num_prompt_tokens, self._finishes[index]),
                prompt_tokens=prompt,
                cached_tokens=cached,
                row=StoreRow(self._store, row),
            )
            for index, (row, (prompt, cached)) in enumerate(zip(self._rows, self._usage, strict=True))
        )

    def record(self) -> RecordedCall:
        """Return a snapshot of the call."""
        sequences = tuple(self.sequence(index) for index in range(len(self.seeds)))
        return RecordedCall(self.num_prompt_tokens, self.seeds, sequences, tuple(self._finishes))

    def release(self) -> None:
        """Remove the call's rows from the store."""
        self._store.release(self._rows)

    def repeats(self, token_ids: I32, seeds: Sequence[int]) -> bool:
        """Return whether these are the arguments of this call; without seeds, only the length of the prompt is compared."""
        return (
            self.seeds == tuple(seeds)
            and self.num_prompt_tokens == len(token_ids)
            and (not seeds or np.array_equal(self.sequence(0).token_ids[: len(token_ids)], token_ids))
        )


class CallJournal:
    """Recorded calls of one group."""

    def __init__(self, calls: Iterable[RecordedCall] = ()) -> None:
        self._store = SampleStore()
        self._calls = [self._restore(call) for call in calls]
        self._unclaimed = list(self._calls)

    def call(self, token_ids: I32, seeds: Sequence[int]) -> EngineCall:
        """Return the call with these arguments that an earlier run of the generate function made, or else a new one.

        An earlier call is returned only once.
        """
        for call in self._unclaimed:
            if call.repeats(token_ids, seeds):
                self._unclaimed.remove(call)
                return call
        call = EngineCall(self._store, token_ids, seeds)
        self._calls.append(call)
        return call

    def close(self) -> None:
        """Drop calls of an earlier run of the generate function that this run did not repeat.

        Call this after the function has returned. No sample contains the tokens of the dropped calls.
        """
        for call in self._unclaimed:
            self._calls.remove(call)
            call.release()
        self._unclaimed = []

    def copy(self) -> tuple[RecordedCall, ...]:
        """Return a snapshot of the calls that have seeds."""
        return tuple(call.record() for call in self._calls if call.seeds)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that hold the tokens in flight, including free space; see ``SampleStore.nbytes``."""
        return self._store.nbytes

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version of the sampled tokens; None if none was sampled."""
        versions = (call.oldest_version for call in self._calls)
        return min((version for version in versions if version is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return sum(call.num_sampled(index) for call in self._calls for index in range(len(call.seeds)))

    def _restore(self, recorded: RecordedCall) -> EngineCall:
        call = EngineCall(self._store, recorded.token_ids, recorded.seeds)
        call.append(range(len(recorded.seeds)), recorded.completions)
        return call


def drop_last_token(part: Completion) -> Completion:
    """Return an interrupted completion without its last token, so that this token is sampled again.

    A finished completion is returned unchanged.

    SGLang reports a request as aborted even if the abort arrives in the step that samples its end-of-sequence token (or
    its last allowed token). A request continued after that token would not end there. Under the same weights, the same
    seed draws the same token at the same position.
    """
    if part.finish != ABORT or not len(part.token_ids):
        return part
    n = len(part.token_ids) - 1
    versions = tuple((start, min(stop, n), version) for start, stop, version in part.versions if start < n)
    experts = None if part.routed_experts is None else part.routed_experts[:-1]
    return replace(
        part, token_ids=part.token_ids[:n], logprobs=part.logprobs[:n], versions=versions, routed_experts=experts
    )


def _fork_prompt(store: SampleStore, token_ids: I32, num_rows: int) -> range:
    """Add ``num_rows`` rows with these tokens and return their indices.

    If the tokens continue a stored row, such as that of an earlier turn, the new rows are forks of the longest such row, with
    its log-probabilities and versions.
    """
    columns = context_columns(token_ids)
    prefix = store.longest_prefix(columns)
    if prefix is None:
        prompt = store.add(columns)
    else:
        (prompt,) = store.fork(prefix)
        num_shared = store.length(prompt)
        if num_shared < len(token_ids):
            was_sampled = bool((store.columns(prompt).versions >= 0).any())
            added_columns = context_columns(token_ids[num_shared:], TOOL_TOKEN if was_sampled else PROMPT_TOKEN)
            store.append_batch(Batch(np.array([prompt]), added_columns, np.array([len(added_columns)])))
    rows = store.fork(prompt, num_rows=num_rows)
    store.release([prompt])
    return rows


def _completion(columns: TokenColumns, num_prompt_tokens: int, finish: str) -> Completion:
    sampled = columns.slice(num_prompt_tokens, len(columns))
    return Completion(
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=tuple(sampled.runs()),
        finish=finish,
        routed_experts=None if columns.experts is None else columns.experts[:-1],
    )
