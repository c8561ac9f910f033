"""The part of a rollout manager's state that checkpoints contain, with its on-disk form and the paths of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import fsync_path
from slime_like.data.dump import save_groups
from slime_like.data.routing import ROUTED_EXPERTS
from slime_like.errors import CheckpointError
from slime_like.rollout.collect.group_filters import FilterReport
from slime_like.rollout.collect.journal import RecordedCall
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.store.columns import TokenColumns, span_versions
from slime_like.types import Prompt, Sample, SampleGroup, Source, Span, Status

FINISH = {status: finish for finish, status in STATUS.items()}


@dataclass(frozen=True, slots=True)
class GeneratedRollout:
    """Scored groups of one rollout that passed the filters, ordered by id, and the time span of their generation."""

    rollout_id: int
    groups: tuple[SampleGroup, ...]
    started: float  # unix seconds
    stopped: float
    num_generated: int = 0  # groups started, including those that filters dropped or over-sampling aborted
    num_refills: int = 0  # rounds of further prompts
    filtered: FilterReport = field(default_factory=FilterReport)

    def record(self) -> dict[str, Any]:
        """Return the JSON form, with empty ``groups`` and without the filter report."""
        return {
            "rollout_id": self.rollout_id,
            "groups": (),
            "started": self.started,
            "stopped": self.stopped,
            "num_generated": self.num_generated,
            "num_refills": self.num_refills,
        }


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt to be sampled, and the number of its groups that were aborted."""

    prompt: Prompt
    num_aborts: int = 0


@dataclass(frozen=True, slots=True)
class PartialGroup:
    """A group to be continued, with the engine calls made for it so far."""

    group_id: int
    prompt: Prompt
    calls: tuple[RecordedCall, ...]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Data cursor, and all prompts that were taken but are in no rollout: given back, or with a group in flight."""

    cursor: Mapping[str, Any]  # cursor of the data source
    queued: tuple[QueuedPrompt, ...]
    partial_groups: tuple[PartialGroup, ...]

    def in_flight(self) -> list[SampleGroup]:
        """Return the prompts given back and the groups in flight, as groups that can be saved.

        A prompt given back becomes a group without samples, whose negative id encodes how often its groups were aborted.
        """
        queued = [SampleGroup(-1 - item.num_aborts, item.prompt, ()) for item in self.queued]
        return [*queued, *map(to_group, self.partial_groups)]

    @staticmethod
    def from_groups(cursor: Mapping[str, Any], groups: Sequence[SampleGroup]) -> RolloutState:
        """Return the state whose ``in_flight`` is ``groups``."""
        queued = tuple(QueuedPrompt(group.prompt, -1 - group.group_id) for group in groups if group.group_id < 0)
        return RolloutState(cursor, queued, tuple(from_group(group) for group in groups if group.group_id >= 0))


def generated_path(base: Path, rollout_id: int) -> Path:
    """Return the path for a rollout that was generated but not trained on: a file next to ``base``, named after ``base``."""
    return base.with_name(f"{base.stem}_made_{rollout_id}.npz")


def in_flight_path(base: Path) -> Path:
    """Return the path for groups in flight and prompts given back: a file next to ``base``, named after ``base``."""
    return base.with_name(f"{base.stem}_in_flight.npz")


def write_groups(path: Path, groups: Sequence[SampleGroup]) -> None:
    """Write ``groups`` to a file of a checkpoint. Raises ``CheckpointError`` if it cannot be written."""
    try:
        save_groups(path, groups)
        fsync_path(path)
    except OSError as error:
        raise CheckpointError(f"{path}: the save failed ({error.strerror}); is the disk full?") from error


def to_group(partial: PartialGroup) -> SampleGroup:
    """Return the on-disk form: one sample per completion.

    The episode id of a sample is the index of its call, and the sample id is the index of the completion in the call.
    """
    samples = [
        _to_sample(partial.group_id, episode, index, call)
        for episode, call in enumerate(partial.calls)
        for index in range(len(call.seeds))
    ]
    return SampleGroup(partial.group_id, partial.prompt, tuple(samples))


def from_group(group: SampleGroup) -> PartialGroup:
    """Return the partial group whose ``to_group`` is ``group``."""
    calls: list[RecordedCall] = []
    for _, grouped in groupby(group.samples, key=lambda sample: sample.episode_id):
        samples = list(grouped)
        sequences = tuple(
            TokenColumns(s.token_ids, s.logprobs, span_versions(s.spans), s.extras.get(ROUTED_EXPERTS)) for s in samples
        )
        finishes = tuple(FINISH[sample.status] for sample in samples)
        calls.append(RecordedCall(samples[0].spans[0].stop, tuple(s.seed for s in samples), sequences, finishes))
    return PartialGroup(group.group_id, group.prompt, tuple(calls))


def _to_sample(group_id: int, episode: int, index: int, call: RecordedCall) -> Sample:
    columns, start = call.sequences[index], call.num_prompt_tokens
    sampled = columns.slice(start, len(columns)).spans()
    spans = [replace(span, start=start + span.start, stop=start + span.stop) for span in sampled]
    return Sample(
        group_id=group_id,
        episode_id=episode,
        sample_id=index,
        seed=call.seeds[index],
        token_ids=columns.token_ids,
        logprobs=columns.logprobs,
        spans=(Span(0, start, Source.PROMPT), *spans),
        status=STATUS.get(call.finishes[index], Status.ABORTED),
        extras={} if columns.experts is None else {ROUTED_EXPERTS: columns.experts},
    )
