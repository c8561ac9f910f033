"""Rewards checked at load."""

from __future__ import annotations

import pytest

from slime_like.config.names import REWARDS
from slime_like.config.rollout import RewardConfig
from slime_like.errors import ConfigError
from slime_like.reward.check import COMPARING, check_reward, label_rule

USERS = "tests.reward.rewards_of_users"


@pytest.mark.parametrize("name", [*REWARDS, f"{USERS}:length"])
def test_what_exists_loads(name: str) -> None:
    assert callable(check_reward(RewardConfig(name=name)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", r"reward.name='maths' is unknown: did you mean 'math'\?, or a dotted path"),
        ("no.such.module:f", r"reward.name='no.such.module:f': cannot import 'no.such.module'"),
        (f"{USERS}:lenght", r"has no 'lenght'; did you mean 'length'\?"),
        (f"{USERS}:NOT_A_FUNCTION", r"is a int; it must be a function \(prompt, sample\)"),
        (f"{USERS}:coroutine", r"is a coroutine function; .+ make it a plain function"),
        (f"{USERS}:three_arguments", r"cannot be called as reward\(prompt, sample\): missing .+'tokenizer'"),
    ],
)
def test_what_cannot_work_says_why_before_a_process_starts(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reward(RewardConfig(name=name))


def test_rows_need_a_label_where_their_reward_compares() -> None:
    rule = label_rule(RewardConfig(name=f"{USERS}:length"))
    assert not rule(None) and not rule(f"{USERS}:length")
    assert rule("math") and rule("exact")
    assert set(REWARDS) >= COMPARING


def test_a_data_file_does_not_choose_code() -> None:
    with pytest.raises(ConfigError, match="rm_type='os:system' is unknown"):
        label_rule(RewardConfig(name="math"))("os:system")
