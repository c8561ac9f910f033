"""Selection over several rollout managers: order of the groups, carried groups, merged metrics and merged warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_like.data.faults import Recovery
from slime_like.errors import CheckpointError
from slime_like.metrics.types import Mean, Sum, reduce_metrics
from slime_like.rollout.selection import GroupSelection, LearningSignal, ManagerRollout, SelectionSpec
from slime_like.types import Reward, SampleGroup, Source, Span
from tests.reward.scored import group as unscored_group

N = 2  # samples per group


def group(group_id: int, rewards: Sequence[float] = (0.0, 1.0), version: int = 0) -> SampleGroup:
    unscored, spans = (
        unscored_group(*("x" for _ in rewards)),
        (Span(0, 1, Source.PROMPT), Span(1, 2, Source.MODEL, version)),
    )
    samples = tuple(
        replace(s, group_id=group_id, reward=Reward(r), spans=spans)
        for s, r in zip(unscored.samples, rewards, strict=True)
    )
    return replace(unscored, group_id=group_id, samples=samples)


def part(*groups: SampleGroup, start: float = 0.0, version: int = 0, **others: object) -> ManagerRollout:
    return ManagerRollout(groups, start, start + 10, version, **others)  # pyright: ignore[reportArgumentType]


def selection(num_groups: int, leftover: str = "carry", *, shuffle: bool = False) -> GroupSelection:
    spec = SelectionSpec(num_groups * N, leftover, max_staleness=1, shuffle=shuffle, seed=3)
    return GroupSelection(spec, LearningSignal("group"))


def ids(groups: Sequence[SampleGroup]) -> list[int]:
    return [group.group_id for group in groups]


def test_groups_times_metrics_and_messages_of_all_managers_are_merged() -> None:
    recoveries = [Recovery(f"engine {i}", "killed", 1.0) for i in range(2)]
    parts = [
        part(
            *(group(0), group(2)),
            start=5.0,
            metrics=(Sum("rollout/generated_groups", 2), Mean("rollout/generated/raw_reward", 0.5, weight=4)),
            messages=("engine 0 is dead",),
            recoveries=(recoveries[0],),
        ),
        part(
            *(group(1), group(3)),
            start=3.0,
            metrics=(Sum("rollout/generated_groups", 3), Mean("rollout/generated/raw_reward", 1.0, weight=1)),
            messages=("engine 1 is dead",),
            recoveries=(recoveries[1],),
        ),
    ]
    collected = selection(4).select(0, parts)
    assert ids(collected.groups) == [0, 1, 2, 3]
    assert (collected.started, collected.stopped) == (3.0, 15.0)
    values = reduce_metrics(collected.metrics)
    assert values["rollout/generated_groups"] == 5
    assert values["rollout/generated/raw_reward"] == pytest.approx(0.6)
    assert [str(warning) for warning in collected.warnings] == ["engine 0 is dead", "engine 1 is dead"]
    assert collected.recoveries == tuple(recoveries)


def test_several_managers_select_the_groups_of_a_single_one() -> None:
    """Managers drop different numbers of groups, so a separate selection for each manager would carry other groups."""
    rounds = [[0, 1, 2, 4], [6, 7], [12, 13, 14, 15, 16, 17], [18], [24, 25, 26]]
    for leftover in ("carry", "drop"):
        single, several = selection(3, leftover), selection(3, leftover)
        for rollout_id, kept_ids in enumerate(rounds):
            groups = [group(i) for i in kept_ids]
            unsplit = single.select(rollout_id, [part(*groups)])
            parts = [part(*(g for g in groups if g.group_id % 2 == index)) for index in range(2)]
            merged = several.select(rollout_id, parts)
            assert ids(merged.groups) == ids(unsplit.groups)
            assert reduce_metrics(merged.metrics) == reduce_metrics(unsplit.metrics)
            assert [str(w) for w in merged.warnings] == [str(w).replace("; ", ";  and ") for w in unsplit.warnings]


def test_carried_groups_are_used_first_until_they_are_too_old() -> None:
    selected = selection(2)
    first = selected.select(0, [part(group(0), group(1), group(2))])
    assert ids(first.groups) == [0, 1]
    assert reduce_metrics(first.metrics)["rollout/carried_groups"] == 1
    second = selected.select(1, [part(group(3), group(4), version=1)])
    assert ids(second.groups) == [2, 3]
    third = selected.select(2, [part(group(5, version=2), group(6, version=2), version=2)])
    assert ids(third.groups) == [5, 6], "group 4 is two versions old"
    assert reduce_metrics(third.metrics)["rollout/dropped_groups/stale"] == 1


def test_carried_groups_do_not_keep_the_memory_of_a_managers_rollout() -> None:
    received_groups = [group(i) for i in range(3)]
    selected = selection(2)
    selected.select(0, [part(*received_groups)])
    (carried,) = selected.select(1, [part(group(3))]).groups[:1]
    assert not np.shares_memory(carried.prompt.token_ids, received_groups[2].prompt.token_ids)
    for old, new in zip(received_groups[2].samples, carried.samples, strict=True):
        assert not np.shares_memory(old.token_ids, new.token_ids)
        assert not np.shares_memory(old.logprobs, new.logprobs)
    assert str(carried) == str(received_groups[2])


def test_an_empty_or_flat_share_gives_no_warning_while_the_rollout_has_a_signal() -> None:
    selected = selection(2, "drop")
    flat = group(0, (0.0, 0.0))
    for rollout_id in range(4):
        collected = selected.select(rollout_id, [part(flat), part(group(1))])
        assert collected.warnings == () and reduce_metrics(collected.metrics)["rollout/without_signal_in_a_row"] == 0
        assert selected.select(rollout_id, [part(), part(group(1))]).warnings == ()
    summaries = [
        part(drop_summary="2 groups were generated"),
        part(drop_summary="3 groups were generated", example=flat),
    ]
    (warning,) = selected.select(9, summaries).warnings
    assert "is empty: nothing is trained on; 2 groups were generated and 3 groups were generated" in warning.text
    assert "reward 0" in warning.example


def test_rewards_are_shuffled_over_the_shares_of_all_managers() -> None:
    groups = [group(i, (i / 10, i / 10 + 0.05)) for i in range(8)]
    unsplit = selection(8, shuffle=True).select(4, [part(*groups)])
    merged = selection(8, shuffle=True).select(4, [part(*groups[index::2]) for index in range(2)])
    assert merged.groups == unsplit.groups
    assert [g.trained_scores for g in merged.groups] != [g.trained_scores for g in groups]


def test_carried_groups_survive_a_restart(tmp_path: Path) -> None:
    selected = selection(2)
    selected.select(0, [part(group(0), group(1)), part(group(2))])
    selected.save(tmp_path / "leftover_1.npz")
    resumed = selection(2)
    resumed.load(tmp_path / "leftover_1.npz")
    assert ids(resumed.select(1, [part(group(3)), part()]).groups) == [2, 3]
    with pytest.raises(CheckpointError, match=r"leftover_2\.npz: the save failed \(.*is the disk full"):
        selected.save(tmp_path / "leftover_1.npz" / "leftover_2.npz")
