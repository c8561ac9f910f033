"""The control experiment."""

from __future__ import annotations

from dataclasses import replace

from slime_like.reward.shuffle import shuffle_rewards
from slime_like.types import Reward, SampleGroup
from tests.reward.scored import group


def groups() -> list[SampleGroup]:
    return [
        replace(g, samples=tuple(replace(s, reward=Reward(10.0 * i + s.sample_id)) for s in g.samples))
        for i, g in enumerate([group(*"abcdefgh"), group(*"abc")])
    ]


def flat(found: list[SampleGroup]) -> list[float]:
    return [s.reward.score for g in found for s in g.samples if s.reward]


def test_rewards_change_owners_across_the_batch_and_nothing_else_does() -> None:
    given, found = groups(), shuffle_rewards(groups(), seed=1)
    assert sorted(flat(found)) == sorted(flat(given))
    assert flat(found) != flat(given)
    assert {score >= 10 for score in flat(found[:1])} == {True, False}
    texts = [[s.text for s in g.samples] for g in found]
    assert texts == [[s.text for s in g.samples] for g in given]


def test_the_seed_decides() -> None:
    assert flat(shuffle_rewards(groups(), seed=1)) == flat(shuffle_rewards(groups(), seed=1))
    assert flat(shuffle_rewards(groups(), seed=1)) != flat(shuffle_rewards(groups(), seed=2))


def test_samples_without_a_reward_keep_none() -> None:
    given = groups()
    given[1] = group("a")
    found = shuffle_rewards(given, seed=0)
    assert found[1].samples[0].reward is None
    assert sorted(flat(found)) == sorted(flat(given))
