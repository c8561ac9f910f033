"""Sampled responses, token by token, as HTML. Every piece of text comes from a model or a data set and is escaped."""

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

MAX_TOKENS = 1500  # of one sample that are shown
LEVELS = (0.01, 0.1, 0.5)  # nats of |trainer - engine| from which a token is coloured

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Token:
    """Everything that is known of one token; nan where it is not."""

    text: str
    rollout: float
    trainer: float
    advantage: float
    weight: float
    version: int
    source: Source

    @property
    def difference(self) -> float:
        """trainer - engine."""
        return self.trainer - self.rollout

    def cells(self) -> tuple[str, ...]:
        """Its columns, for people."""
        version = "" if self.version < 0 else str(self.version)
        values = (self.rollout, self.trainer, self.difference, self.advantage, self.weight)
        return (*("" if math.isnan(value) else number(value) for value in values), version, self.source.value)


COLUMNS = ("engine", "trainer", "difference", "advantage", "weight", "version", "span")


def tokens_of(sample: Sample, view: TokenTable | None, decode: Decode) -> list[Token]:
    """The tokens of a sample, with the trainer's columns where ``view`` has the sample."""
    at = _place(sample, view)
    found: list[Token] = []
    for span in sample.spans:
        for index in range(span.start, span.stop):
            text = visible(decode([int(sample.token_ids[index])]))
            logprob = float(sample.logprobs[index]) if span.source is Source.MODEL else math.nan
            extra = (math.nan, math.nan, math.nan)
            if view is not None and at is not None:
                row = at + index
                extra = tuple(float(c[row]) for c in (view.trainer_logprobs, view.advantages, view.loss_weight))
            found.append(Token(text, logprob, extra[0], extra[1], extra[2], span.version, span.source))
    return found


def group_html(group: SampleGroup, view: TokenTable | None, decode: Decode, rollout_id: int) -> Iterator[str]:
    """The samples of a group that the view has; all of a group's where there is no view."""
    shown = [s for s in group.samples if view is None or _place(s, view) is not None]
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
        rows = ((at, repr(token.text), *token.cells()) for at, token in enumerate(tokens[:MAX_TOKENS]))
        yield table(("", "token", *COLUMNS), rows, numbers=(0, 2, 3, 4, 5, 6, 7))
        yield "</details></details>"


def legend() -> str:
    """What colours mean."""
    keys = [f'<span class="t d{at + 1}">from {level:g}</span>' for at, level in enumerate(LEVELS)]
    return (
        f"<p class=note>|trainer - engine| log-probability of a sampled token: {', '.join(keys)} nats. Grey: prompt; "
        "dotted: a tool's. Pointing at a token shows its numbers.</p>"
    )


def _facts(sample: Sample) -> str:
    versions = ", ".join(str(version) for version in dict.fromkeys(sample.versions)) or "none"
    return f"{sample.status.value}, {sample.num_response_tokens} sampled tokens, weights of version {versions}"


def _place(sample: Sample, view: TokenTable | None) -> int | None:
    """Where a sample's tokens begin in the view."""
    if view is None:
        return None
    for index in np.flatnonzero(view.sample_ids == sample.sample_id):
        where = view.sequence(int(index))
        if np.array_equal(view.token_ids[where], sample.token_ids):
            return where.start
    return None


def _span(token: Token) -> str:
    values = zip(COLUMNS, token.cells(), strict=True)
    title = "; ".join([repr(token.text), *(f"{name} {cell}" for name, cell in values if cell)])
    gap = abs(token.difference)
    level = 0 if math.isnan(gap) else sum(gap >= least for least in LEVELS)
    return f'<span class="t {token.source.value} d{level}" title="{html(title)}">{html(token.text)}</span>'
