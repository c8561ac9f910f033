"""Sampled responses, token by token, as HTML. All text comes from models or datasets and is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.data.token_view import TokenTable
from slime_like.printable import visible
from slime_like.report.chart import number
from slime_like.report.page import html, table
from slime_like.types import Sample, SampleGroup, Source

MAX_TOKENS = 1500  # shown per sample
LEVELS = (0.01, 0.1, 0.5)  # nats of |trainer - engine|: thresholds of the colours

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Token:
    """Data of one token; nan if unknown."""

    text: str
    rollout: float
    trainer: float
    advantage: float
    weight: float
    version: int
    source: Source

    @property
    def difference(self) -> float:
        """Return trainer - engine."""
        return self.trainer - self.rollout

    def cells(self) -> tuple[str, ...]:
        """Return the formatted columns."""
        version = "" if self.version < 0 else str(self.version)
        values = (self.rollout, self.trainer, self.difference, self.advantage, self.weight)
        return (*("" if math.isnan(value) else number(value) for value in values), version, self.source.value)


COLUMNS = ("engine", "trainer", "difference", "advantage", "weight", "version", "span")


def tokens_of(sample: Sample, view: TokenTable | None, decode: Decode) -> list[Token]:
    """Return the tokens of a sample, with the trainer's columns if ``view`` has the sample."""
    first_row = _first_row(sample, view)
    tokens: list[Token] = []
    for span in sample.spans:
        for index in range(span.start, span.stop):
            text = visible(decode([int(sample.token_ids[index])]))
            logprob = float(sample.logprobs[index]) if span.source is Source.MODEL else math.nan
            extra = (math.nan, math.nan, math.nan)
            if view is not None and first_row is not None:
                row = first_row + index
                extra = tuple(float(c[row]) for c in (view.trainer_logprobs, view.advantages, view.loss_weight))
            tokens.append(Token(text, logprob, extra[0], extra[1], extra[2], span.version, span.source))
    return tokens


def group_html(group: SampleGroup, view: TokenTable | None, decode: Decode, rollout_id: int) -> Iterator[str]:
    """Yield the HTML of a group's samples that are in the view; of all samples without a view."""
    shown = [s for s in group.samples if view is None or _first_row(s, view) is not None]
    for sample in shown:
        reward = "not scored" if sample.reward is None else f"reward {number(sample.reward.score)}"
        label = "" if group.prompt.label is None else f", label {visible(group.prompt.label)}"
        title = f"rollout {rollout_id}, group {group.group_id}, sample {sample.sample_id}: {reward}{label}"
        tokens = tokens_of(sample, view, decode)
        yield f"<details open><summary>{html(title)} <small>{html(_facts(sample))}</small></summary>"
        yield f'<p class="tokens">{"".join(map(_span, tokens[:MAX_TOKENS]))}</p>'
        if len(tokens) > MAX_TOKENS:
            yield f"<p class=note>{len(tokens) - MAX_TOKENS} more tokens are not shown</p>"
        yield "<details><summary>every token</summary>"
        rows = ((index, repr(token.text), *token.cells()) for index, token in enumerate(tokens[:MAX_TOKENS]))
        yield table(("", "token", *COLUMNS), rows, numbers=(0, 2, 3, 4, 5, 6, 7))
        yield "</details></details>"


def legend() -> str:
    """Return the legend of colours."""
    keys = [f'<span class="t d{index + 1}">from {level:g}</span>' for index, level in enumerate(LEVELS)]
    return (
        f"<p class=note>|trainer - engine| log-probability of a sampled token: {', '.join(keys)} nats. Grey: prompt; "
        "dotted: a tool's. Pointing at a token shows its numbers.</p>"
    )


def _facts(sample: Sample) -> str:
    versions = ", ".join(str(version) for version in dict.fromkeys(sample.versions)) or "none"
    return f"{sample.status.value}, {sample.num_response_tokens} sampled tokens, weights of version {versions}"


def _first_row(sample: Sample, view: TokenTable | None) -> int | None:
    """Return the index of a sample's first token in the view, None if it is missing."""
    if view is None:
        return None
    for index in np.flatnonzero(view.sample_ids == sample.sample_id):
        span = view.sequence(int(index))
        if np.array_equal(view.token_ids[span], sample.token_ids):
            return span.start
    return None


def _span(token: Token) -> str:
    values = zip(COLUMNS, token.cells(), strict=True)
    title = "; ".join([repr(token.text), *(f"{name} {cell}" for name, cell in values if cell)])
    gap = abs(token.difference)
    level = 0 if math.isnan(gap) else sum(gap >= threshold for threshold in LEVELS)
    return f'<span class="t {token.source.value} d{level}" title="{html(title)}">{html(token.text)}</span>'
