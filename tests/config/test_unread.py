"""Options that are refused if unread (test_bad_training.py) are accepted with the setting that reads them."""

from __future__ import annotations

from functools import reduce

import pytest

from slime_like.config.load.loader import load_config

# setting that reads the option, then the option and its value
READ = {
    "KL loss": ("algo.kl_loss_coef=0.1", "algo.kl_loss_type", "k1"),
    "PPO": ("algo=ppo algo.kl_coef=0.1", "algo.kl_reward_type", "k2"),
    "REINFORCE++": ("algo=reinforce_pp algo.kl_coef=0.1", "algo.kl_reward_type", "k2"),
    "REINFORCE++ baseline": ("algo=reinforce_pp_baseline algo.kl_coef=0.1", "algo.kl_reward_type", "k2"),
    "WSD": ("optim.schedule=wsd", "optim.wsd_decay_style", "linear"),
    "offload": ("optim.cpu_offload=true", "optim.cpu_offload_fraction", "0.5"),
    "recompute": ("model.recompute=full", "model.recompute_method", "block"),
    "default estimator": ("", "algo.kl_loss_type", "low_var_kl"),
}


@pytest.mark.parametrize("case", READ.values(), ids=list(READ))
def test_an_option_is_accepted_with_its_reader(case: tuple[str, str, str], argv: list[str]) -> None:
    switch, name, value = case
    cfg = load_config([*argv, *switch.split(), f"{name}={value}"], files=False)
    assert str(reduce(getattr, name.split("."), cfg)) == value
