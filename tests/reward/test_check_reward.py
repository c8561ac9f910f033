"""Checks of rewards at load."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.schema.names import REWARDS
from slime_like.config.schema.rollout import RewardConfig
from slime_like.errors import ConfigError
from slime_like.reward.check import check_reward, label_rule, load_reward

USERS = "tests.reward.rewards_of_users"


@pytest.mark.parametrize("name", [*REWARDS, f"{USERS}:length", f"{USERS}:ranks"])
def test_existing_rewards_load(name: str) -> None:
    assert callable(load_reward("reward.name", name))
    check_reward(RewardConfig(name=name))
    check_reward(RewardConfig(weights={"rm_type": 1.0, name: 0.5}))


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert [name for name in REWARDS if f"| `{name}`" not in page] == []


@pytest.mark.parametrize("name", REWARDS)
def test_every_name_takes_the_prefix(name: str) -> None:
    assert load_reward("reward.name", f"boxed_{name}") is load_reward("reward.name", name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", r"reward.name='maths' is unknown: did you mean 'math'\? \(your own code: my_package"),
        ("my_module.score", r"reward.name='my_module.score' is unknown: .*\(your own code: my_module:score, see docs"),
        ("my_file.py", r"reward.name='my_file.py' is unknown: .*\(your own code: my_file.py:FUNCTION, see docs"),
        ("boxed_maths", r"reward.name='boxed_maths' is unknown: did you mean 'boxed_math'\?"),
        ("no.such.module:f", r"reward.name='no.such.module:f': cannot import 'no.such.module'"),
        (f"{USERS}:lenght", r"has no 'lenght'; did you mean 'length'\?"),
        (f"{USERS}:NOT_A_FUNCTION", r"is a int; it must be a function \(prompt, sample\)"),
        (f"{USERS}:coroutine", r"is a coroutine function; .+ define it with def"),
        (f"{USERS}:three_arguments", r"cannot be called as reward\(prompt, sample\): missing .+'tokenizer'"),
    ],
)
def test_an_invalid_reward_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_reward(RewardConfig(name=name))


def test_rewards_that_compare_need_a_label() -> None:
    rule = label_rule(RewardConfig(name="gpqa", remote_url="http://127.0.0.1:1"))
    needs_label = {name: rule(name) for name in REWARDS} | {"boxed_math": rule("boxed_math")}
    assert {name for name, needed in needs_label.items() if not needed} == {"given", "gpqa", "remote_rm"}
    assert not rule(None)
    assert label_rule(RewardConfig(name=f"{USERS}:length", weights={"rm_type": 1.0, "math": 0.5}))(None)


def test_a_function_of_the_user_scores_every_row() -> None:
    rule = label_rule(RewardConfig(name=f"{USERS}:length"))
    assert not rule("math") and not rule("some_rm_type_of_slime")


def test_a_data_file_does_not_choose_code() -> None:
    with pytest.raises(ConfigError, match="rm_type='os:system' is unknown"):
        label_rule(RewardConfig(name="math"))("os:system")


def test_a_row_cannot_use_a_reward_server_without_an_address() -> None:
    with pytest.raises(ConfigError, match=r"rm_type='remote_rm' needs a reward server: set reward.remote_url"):
        label_rule(RewardConfig(name="math"))("remote_rm")
