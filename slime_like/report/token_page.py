"""HTML of sampled responses, token by token. Text from models and datasets is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from slime_like.data.token_table import TokenTable
from slime_like.printable import visible
from slime_like.report.chart import number
from slime_like.report.page import html, table
from slime_like.types import Sample, SampleGroup, Source
from slime_like.util.counted import counted

MAX_TOKENS = 1500  # shown per sample
LEVELS = (0.01, 0.1, 0.5)  # nats of |trainer - engine|: thresholds of the colours

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Token:
    """Row of one token: log-probabilities of engine and trainer, advantage and loss weight; nan if unknown."""

    text: str
    rollout: float
    trainer: float
    advantage: float
    weight: float
    version: int
    source: Source

    @property
    def difference(self) -> float:
        """Return the trainer's log-probability minus the engine's."""
        return self.trainer - self.rollout

    def cells(self) -> tuple[str, ...]:
        """Return the token's table cells, one per entry of ``COLUMNS``."""
        version = "" if self.version < 0 else str(self.version)
        values = (self.rollout, self.trainer, self.difference, self.advantage, self.weight)
        return (*("" if math.isnan(value) else number(value) for value in values), version, self.source.value)


COLUMNS = ("engine", "trainer", "difference", "advantage", "weight", "version", "span")


def _tokens_of(sample: Sample, token_table: TokenTable | None, decode: Decode) -> Iterator[Token]:
    """Yield the tokens of a sample, with the trainer's columns if ``token_table`` contains the sample."""
    first_row = _first_row(sample, token_table)
    for span in sample.spans:
        for index in range(span.start, span.stop):
            text = visible(decode([int(sample.token_ids[index])]))
            logprob = float(sample.logprobs[index]) if span.source is Source.MODEL else math.nan
            trainer, advantage, weight = math.nan, math.nan, math.nan
            if token_table is not None and first_row is not None:
                columns = (token_table.trainer_logprobs, token_table.advantages, token_table.loss_weight)
                trainer, advantage, weight = (float(column[first_row + index]) for column in columns)
            yield Token(text, logprob, trainer, advantage, weight, span.version, span.source)


def group_html(group: SampleGroup, token_table: TokenTable | None, decode: Decode, rollout_id: int) -> Iterator[str]:
    """Yield the HTML of the group's samples that are in ``token_table``, or of all samples if it is None."""
    samples = [s for s in group.samples if token_table is None or _first_row(s, token_table) is not None]
    for sample in samples:
        reward = "not scored" if sample.reward is None else f"reward {number(sample.reward.score)}"
        label = "" if group.prompt.label is None else f", label {visible(group.prompt.label)}"
        title = f"rollout {rollout_id}, group {group.group_id}, sample {sample.sample_id}: {reward}{label}"
        tokens = list(islice(_tokens_of(sample, token_table, decode), MAX_TOKENS))
        yield f"<details open><summary>{html(title)} <small>{html(_facts(sample))}</small></summary>"
        yield f'<p class="tokens">{"".join(map(_span, tokens))}</p>'
        if num_hidden := len(sample.token_ids) - len(tokens):
            yield f"<p class=note>{counted(num_hidden, 'more token')} not shown</p>"
        yield "<details><summary>every token</summary>"
        rows = ((index, repr(token.text), *token.cells()) for index, token in enumerate(tokens))
        yield table(("", "token", *COLUMNS), rows, numbers=(0, 2, 3, 4, 5, 6, 7))
        yield "</details></details>"


def legend() -> str:
    """Return the HTML legend of the token colours."""
    keys = [f'<span class="t d{index + 1}">from {level:g}</span>' for index, level in enumerate(LEVELS)]
    return (
        f"<p class=note>|trainer - engine| log-probability of a sampled token: {', '.join(keys)} nats. Grey: prompt; "
        "dotted: a tool's. Pointing at a token shows its numbers.</p>"
    )


def _facts(sample: Sample) -> str:
    versions = ", ".join(str(version) for version in dict.fromkeys(sample.versions)) or "none"
    return (
        f"{sample.status.value}, {counted(sample.num_response_tokens, 'sampled token')}, weights of version {versions}"
    )


def _first_row(sample: Sample, token_table: TokenTable | None) -> int | None:
    """Return the index of a sample's first token in ``token_table``; None if the table does not contain the sample."""
    if token_table is None:
        return None
    for index in np.flatnonzero(token_table.sample_ids == sample.sample_id):
        span = token_table.sequence(int(index))
        if np.array_equal(token_table.token_ids[span], sample.token_ids):
            return span.start
    return None


def _span(token: Token) -> str:
    values = zip(COLUMNS, token.cells(), strict=True)
    title = "; ".join([repr(token.text), *(f"{name} {cell}" for name, cell in values if cell)])
    gap = abs(token.difference)
    level = 0 if math.isnan(gap) else sum(gap >= threshold for threshold in LEVELS)
    return f'<span class="t {token.source.value} d{level}" title="{html(title)}">{html(token.text)}</span>'
