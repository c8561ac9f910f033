"""Shuffled rewards, the control experiment."""

from __future__ import annotations

from dataclasses import replace

from slime_like.reward.shuffle import shuffle_rewards
from slime_like.types import Reward, SampleGroup, Status
from tests.reward.scored import group


def groups() -> list[SampleGroup]:
    return [
        replace(g, samples=tuple(replace(s, reward=Reward(10.0 * i + s.sample_id)) for s in g.samples))
        for i, g in enumerate([group(*"abcdefgh"), group(*"abc")])
    ]


def flat(scored_groups: list[SampleGroup]) -> list[float]:
    return [s.reward.score for g in scored_groups for s in g.samples if s.reward]


def test_only_rewards_are_shuffled_across_the_batch() -> None:
    original, shuffled = groups(), shuffle_rewards(groups(), seed=1)
    assert sorted(flat(shuffled)) == sorted(flat(original))
    assert flat(shuffled) != flat(original)
    assert {score >= 10 for score in flat(shuffled[:1])} == {True, False}
    texts = [[s.text for s in g.samples] for g in shuffled]
    assert texts == [[s.text for s in g.samples] for g in original]


def test_the_order_follows_the_seed() -> None:
    assert flat(shuffle_rewards(groups(), seed=1)) == flat(shuffle_rewards(groups(), seed=1))
    assert flat(shuffle_rewards(groups(), seed=1)) != flat(shuffle_rewards(groups(), seed=2))


def test_samples_without_a_reward_keep_none() -> None:
    original = groups()
    original[1] = group("a")
    shuffled = shuffle_rewards(original, seed=0)
    assert shuffled[1].samples[0].reward is None
    assert sorted(flat(shuffled)) == sorted(flat(original))


def test_failed_samples_keep_their_zero() -> None:
    original = groups()
    failed = replace(original[1].samples[0], status=Status.FAILED, reward=Reward(0.0))
    original[1] = replace(original[1], samples=(failed, *original[1].samples[1:]))
    for seed in range(10):
        shuffled = shuffle_rewards(original, seed)
        assert shuffled[1].samples[0].reward == Reward(0.0)
        assert sorted(flat(shuffled)) == sorted(flat(original))
