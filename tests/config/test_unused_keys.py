"""Options that are refused if unread (test_bad_training.py) are accepted with the setting that reads them, or unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.schema.base import Config, key
from slime_like.config.schema.unused_keys import refuse_unused_keys
from slime_like.errors import ConfigError

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


@dataclass(kw_only=True)
class Collections(Config):
    """Keys whose defaults are lists and mappings."""

    names: list[str] = key(list, "Names.")
    sizes: list[int] = key([1, 2], "Sizes.")
    values: dict[str, int] = key({"a": 1}, "Values.")


@pytest.mark.parametrize("case", READ.values(), ids=list(READ))
def test_an_option_is_accepted_with_its_reader(case: tuple[str, str, str], argv: list[str]) -> None:
    switch, name, value = case
    cfg = load_config([*argv, *switch.split(), f"{name}={value}"], files=False)
    assert str(reduce(getattr, name.split("."), cfg)) == value


def test_an_unread_list_or_mapping_is_refused_only_if_it_was_changed() -> None:
    keys = ("names", "sizes", "values")
    refuse_unused_keys("group.", Collections(), keys, "group.x=false", "group.x=true")
    for changed in (Collections(names=["a"]), Collections(sizes=[1]), Collections(values={})):
        with pytest.raises(ConfigError, match=r"has no effect with group\.x=false"):
            refuse_unused_keys("group.", changed, keys, "group.x=false", "group.x=true")
