"""Partial answers of a group, call by call: enough to continue it under new weights or in another process.

A generate function is never told that it was interrupted. Its calls wait; if the process has ended, the function runs
again and its repeated calls are answered from this record. A call that it does not repeat (because a tool answered
differently) is sent to an engine again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from slime_like.interfaces import Completion
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.types import I32, Prompt, Sample, SampleGroup, Source, Span, Status

ABORT = "abort"  # the finish of a completion that may be continued
NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), ABORT)
FINISH = {status: finish for finish, status in STATUS.items()}


@dataclass(slots=True, eq=False)
class EngineCall:
    """One ``Engine.generate`` call: its prompt and one (possibly partial) completion per seed."""

    token_ids: I32  # [P]
    seeds: tuple[int, ...]
    completions: list[Completion]

    def unfinished(self) -> list[int]:
        """Return the indices of completions that may be continued."""
        return [i for i, completion in enumerate(self.completions) if completion.finish == ABORT]


class PartialCompletions:
    """Recorded calls of one group."""

    def __init__(self, calls: Iterable[EngineCall] = ()) -> None:
        self._calls = list(calls)
        self._unclaimed = list(self._calls)

    def call(self, token_ids: I32, seeds: Sequence[int]) -> EngineCall:
        """Return the record of this call: from an earlier run of the function if it has one, or a new one."""
        for call in self._unclaimed:
            if call.seeds == tuple(seeds) and np.array_equal(call.token_ids, token_ids):
                self._unclaimed.remove(call)
                return call
        call = EngineCall(token_ids, tuple(seeds), [NOTHING] * len(seeds))
        self._calls.append(call)
        return call

    def close(self) -> None:
        """Drop calls of an earlier run that this run did not repeat: no sample contains them. Called when the function ends."""
        self._calls = [call for call in self._calls if call not in self._unclaimed]
        self._unclaimed = []

    def copy(self) -> tuple[EngineCall, ...]:
        """Return a snapshot of the calls."""
        return tuple(replace(call, completions=list(call.completions)) for call in self._calls)

    @property
    def oldest_version(self) -> int | None:
        """Weight version of the oldest token; None if none was sampled."""
        versions = (version for c in self._completions() for _, _, version in c.versions)
        return min(versions, default=None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return sum(len(completion.token_ids) for completion in self._completions())

    def _completions(self) -> Iterable[Completion]:
        return (completion for call in self._calls for completion in call.completions)


def continuable(part: Completion) -> Completion:
    """Return an interrupted completion without its last token, which is sampled again.

    SGLang reports a request that is aborted in the step of its end-of-sequence token (or last allowed token) as aborted:
    continued after that token it would never end. The same seed at the same position draws the same token under the same
    weights.
    """
    if part.finish != ABORT or not len(part.token_ids):
        return part
    n = len(part.token_ids) - 1
    versions = tuple((start, min(stop, n), version) for start, stop, version in part.versions if start < n)
    return replace(part, token_ids=part.token_ids[:n], logprobs=part.logprobs[:n], versions=versions)


def joined(first: Completion, second: Completion) -> Completion:
    """Concatenate a completion and its continuation; each token keeps the log-probability and version it was sampled with."""
    n = len(first.token_ids)
    shifted = [*first.versions, *((start + n, stop + n, version) for start, stop, version in second.versions)]
    runs = [list(run) for _, run in groupby(shifted, key=lambda span: span[2])]
    return Completion(
        token_ids=np.concatenate([first.token_ids, second.token_ids]).astype(np.int32),
        logprobs=np.concatenate([first.logprobs, second.logprobs]).astype(np.float32),
        versions=tuple((run[0][0], run[-1][1], run[0][2]) for run in runs),
        finish=second.finish,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        cached_tokens=first.cached_tokens + second.cached_tokens,
    )


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group to be continued."""

    group_id: int
    prompt: Prompt
    calls: tuple[EngineCall, ...]


def to_group(unfinished: Unfinished) -> SampleGroup:
    """Return the on-disk form: one sample per completion, the call as its episode and the index in the call as its id."""
    samples = [
        _to_sample(unfinished.group_id, episode, index, call)
        for episode, call in enumerate(unfinished.calls)
        for index in range(len(call.seeds))
    ]
    return SampleGroup(unfinished.group_id, unfinished.prompt, tuple(samples))


def from_group(group: SampleGroup) -> Unfinished:
    """Return the inverse of ``to_group``."""
    calls: list[EngineCall] = []
    for _, grouped in groupby(group.samples, key=lambda sample: sample.episode_id):
        samples = list(grouped)
        prompt_ids = samples[0].token_ids[: samples[0].spans[0].stop]
        calls.append(
            EngineCall(
                prompt_ids, tuple(s.seed for s in samples), [_to_completion(s, len(prompt_ids)) for s in samples]
            )
        )
    return Unfinished(group.group_id, group.prompt, tuple(calls))


def _to_sample(group_id: int, episode: int, index: int, call: EngineCall) -> Sample:
    completion, start = call.completions[index], len(call.token_ids)
    spans = [Span(start + a, start + b, Source.MODEL, version) for a, b, version in completion.versions]
    return Sample(
        group_id=group_id,
        episode_id=episode,
        sample_id=index,
        seed=call.seeds[index],
        token_ids=np.concatenate([call.token_ids, completion.token_ids]).astype(np.int32),
        logprobs=np.concatenate([np.full(start, np.nan), completion.logprobs]).astype(np.float32),
        spans=(Span(0, start, Source.PROMPT), *spans),
        status=STATUS.get(completion.finish, Status.ABORTED),
    )


def _to_completion(sample: Sample, start: int) -> Completion:
    versions = tuple((span.start - start, span.stop - start, span.version) for span in sample.spans[1:])
    return Completion(sample.token_ids[start:], sample.logprobs[start:], versions, FINISH[sample.status])
