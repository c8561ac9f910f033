"""Dumped rollouts: loaded unchanged, or refused with the name of the file; metrics of groups."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_like.checkpoint.files import SCRATCH
from slime_like.data.dump import load_groups, rollout_path, save_groups
from slime_like.data.group_metrics import group_metrics
from slime_like.errors import DataError
from slime_like.metrics.types import reduce_metrics
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span, Status
from tests.damage.world import groups
from tests.hypothesis_examples import num_examples


def group(group_id: int, lengths: list[int], seed: int = 0, version: int = 2) -> SampleGroup:
    rng = np.random.default_rng([seed, group_id])
    prompt = Prompt(group_id, rng.integers(0, 50, 3).astype(np.int32), "2+2=", "4", None, {"k": [1, "x"]})
    samples: list[Sample] = []
    for i, length in enumerate(lengths):
        token_ids = np.concatenate([prompt.token_ids, rng.integers(0, 50, length)]).astype(np.int32)
        logprobs = np.concatenate([np.full(3, np.nan), rng.normal(size=length)]).astype(np.float32)
        spans = (Span(0, 3, Source.PROMPT), Span(3, 3 + length, Source.MODEL, version))
        reward = Reward(float(i % 2), float(i % 2))
        extras = {"mask": np.arange(i + 1)} if i % 2 else {}
        sample = Sample(group_id, i, i, i, token_ids, logprobs, spans, Status.COMPLETED, "4", reward, extras)
        samples.append(sample)
    return SampleGroup(group_id, prompt, tuple(samples))


def assert_same(a: SampleGroup, b: SampleGroup) -> None:
    assert (a.group_id, a.prompt.text, a.prompt.label, dict(a.prompt.metadata)) == (
        b.group_id,
        b.prompt.text,
        b.prompt.label,
        dict(b.prompt.metadata),
    )
    np.testing.assert_array_equal(a.prompt.token_ids, b.prompt.token_ids)
    for x, y in zip(a.samples, b.samples, strict=True):
        np.testing.assert_array_equal(x.token_ids, y.token_ids)
        assert x.extras.keys() == y.extras.keys()
        for name in x.extras:
            np.testing.assert_array_equal(x.extras[name], y.extras[name])
        np.testing.assert_array_equal(x.logprobs, y.logprobs)
        assert (x.spans, x.status, x.reward, x.seed, x.text, x.sample_id) == (
            y.spans,
            y.status,
            y.reward,
            y.seed,
            y.text,
            y.sample_id,
        )


@given(st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=5))
@settings(max_examples=num_examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_dumped_groups_are_loaded_unchanged(tmp_path: Path, shape: list[list[int]]) -> None:
    groups = [group(i, lengths) for i, lengths in enumerate(shape)]
    path = rollout_path(tmp_path, 12)
    save_groups(path, groups)
    for a, b in zip(groups, load_groups(path), strict=True):
        assert_same(a, b)


def test_a_modified_dump_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout_0000000.npz"
    save_groups(path, groups(0, 1))
    with np.load(path) as arrays:
        columns = dict(arrays)
    for name, value in (("logprobs", columns["logprobs"] - 1), ("extra/1/mask", columns["extra/1/mask"][:2])):
        np.savez(path, **{**columns, name: value})
        with pytest.raises(DataError, match=r"rollout_0000000\.npz is not a dumped rollout \(its columns do not match"):
            load_groups(path)
    np.savez(path, **{name: column for name, column in columns.items() if name != "digest"})
    assert len(load_groups(path)) == 1, "files of older versions have no digest"


def test_a_missing_dump_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rollout_0000003\.npz.*run\.replay_from"):
        load_groups(rollout_path(tmp_path, 3))


def test_a_torn_dump_names_the_file(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 0)
    save_groups(path, [group(0, [3, 4])])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"is not a readable \.npz file"):
        load_groups(path)


def test_group_metrics_by_hand() -> None:
    values = reduce_metrics(group_metrics([group(0, [1, 3]), group(1, [2], version=1)], trainer_version=2))
    assert values["rollout/response_len/mean"] == 2.0
    assert values["rollout/raw_reward"] == pytest.approx(1 / 3)
    assert values["rollout/zero_std_ratio"] == 0.5
    assert values["rollout/staleness_max"] == 1.0
    assert values["rollout/num_samples"] == 3.0


def test_demonstrations_report_no_reward() -> None:
    values = reduce_metrics(group_metrics([group(0, [1, 3], version=-1)], trainer_version=2))
    assert "rollout/num_samples" in values
    assert "rollout/raw_reward" not in values


def test_a_failed_sample_enters_no_mean_reward() -> None:
    base_group = group(0, [2, 2, 2, 2])
    rewards = (0.1, 0.1, 0.1, 0.0)  # three times 0.1 has a standard deviation of 1e-17
    samples = [replace(s, reward=Reward(r)) for s, r in zip(base_group.samples, rewards, strict=True)]
    samples[3] = replace(samples[3], status=Status.FAILED)
    values = reduce_metrics(group_metrics([replace(base_group, samples=tuple(samples))], trainer_version=2))
    assert values["rollout/raw_reward"] == pytest.approx(0.1)
    assert values["rollout/zero_std_ratio"] == 1.0


def test_a_dump_that_fails_names_its_file_and_leaves_none(tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + SCRATCH).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        save_groups(path, [group(0, [3, 4])])
    assert error.value.filename == str(path)
    assert list(path.parent.iterdir()) == []
