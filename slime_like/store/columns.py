"""Columns of a sequence: token ids, log-probabilities, weight versions and routed experts, one entry per token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from slime_like.types import F32, I32, RoutedExperts, Source, Span

PROMPT_TOKEN, TOOL_TOKEN = -1, -2
"""Entries of ``TokenColumns.versions`` for tokens that were not sampled. Versions of sampled tokens are 0 or more."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Columns of L tokens."""

    token_ids: I32  # [L]
    logprobs: F32  # [L], nan if the token was not sampled
    versions: I32  # [L], weight version that sampled the token, or PROMPT_TOKEN or TOOL_TOKEN
    experts: RoutedExperts | None = None  # [L, blocks, experts per token], zeros for the last sampled token

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return self.token_ids.nbytes + self.logprobs.nbytes + self.versions.nbytes + experts

    def slice(self, start: int, stop: int) -> TokenColumns:
        """Return views of the tokens ``[start, stop)``."""
        experts = None if self.experts is None else self.experts[start:stop]
        return TokenColumns(self.token_ids[start:stop], self.logprobs[start:stop], self.versions[start:stop], experts)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (start, stop, version) of each run of tokens with the same entry in ``versions``."""
        if not len(self.versions):
            return []
        edges = [0, *(np.flatnonzero(np.diff(self.versions)) + 1).tolist(), len(self.versions)]
        values = self.versions[edges[:-1]].tolist()
        return list(zip(edges[:-1], edges[1:], values, strict=True))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of a sample with these columns."""
        return tuple(_span(start, stop, version) for start, stop, version in self.runs())

    def begins_with(self, prefix: TokenColumns) -> bool:
        """Return whether token ids, log-probabilities and versions begin with the entries of ``prefix``, bit for bit."""
        n = len(prefix)
        return (
            len(self) >= n
            and np.array_equal(self.token_ids[:n], prefix.token_ids)
            and np.array_equal(self.versions[:n], prefix.versions)
            and np.array_equal(self.logprobs[:n].view(np.int32), prefix.logprobs.view(np.int32))  # nan equals nan
        )


def context_columns(token_ids: I32, kind: int = PROMPT_TOKEN) -> TokenColumns:
    """Return the columns of tokens that were not sampled; ``kind`` is PROMPT_TOKEN or TOOL_TOKEN."""
    n = len(token_ids)
    ids = np.asarray(token_ids, dtype=np.int32)
    return TokenColumns(ids, np.full(n, np.nan, dtype=np.float32), np.full(n, kind, dtype=np.int32))


def sampled_columns(token_ids: I32, logprobs: F32, versions: Iterable[tuple[int, int, int]]) -> TokenColumns:
    """Return the columns of sampled tokens; ``versions`` has (start, stop, version) of all tokens, in order."""
    column = np.empty(len(token_ids), dtype=np.int32)
    for start, stop, version in versions:
        column[start:stop] = version
    return TokenColumns(token_ids, logprobs, column)


def span_versions(spans: Iterable[Span]) -> I32:
    """Return the column ``versions`` of a sample with these spans."""
    entries, lengths = [], []
    for span in spans:
        entries.append(span.version if span.source is Source.MODEL else _KINDS[span.source])
        lengths.append(span.stop - span.start)
    return np.repeat(np.array(entries, dtype=np.int32), lengths)


def join(parts: Iterable[TokenColumns]) -> TokenColumns:
    """Concatenate the columns of several sequences. Experts are dropped unless there is only one sequence."""
    items = list(parts)
    if len(items) == 1:
        return items[0]
    return TokenColumns(
        np.concatenate([item.token_ids for item in items]),
        np.concatenate([item.logprobs for item in items]),
        np.concatenate([item.versions for item in items]),
    )


_KINDS = {Source.PROMPT: PROMPT_TOKEN, Source.TOOL: TOOL_TOKEN}
_SOURCES = {kind: source for source, kind in _KINDS.items()}


def _span(start: int, stop: int, version: int) -> Span:
    if version in _SOURCES:
        return Span(start, stop, _SOURCES[version])
    return Span(start, stop, Source.MODEL, version)
