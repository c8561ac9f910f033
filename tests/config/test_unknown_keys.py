"""Hints about unknown keys and flags: a similar name, or the place where the names are listed."""

import re

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.load.other_names import _our_keys, our_key
from slime_like.config.schema.known import free_keys, known_keys
from slime_like.errors import ConfigError
from slime_like_compat.flags.translate import translate

# key=value -> pattern of the hint
KEYS = {
    "rollout.n_samples=1": r"did you mean 'rollout\.n_samples_per_prompt'\?",
    "rolout.batch_size=1": r"did you mean 'rollout\.batch_size'\?",
    "algo.lr=1": r"did you mean 'optim\.lr' or 'critic\.lr'\?",
    "rollout.port=1": r"rollout has batch_size, .+, remote_experts\.\*, .+ \(python train\.py --help rollout describes them\)",
    "data.eval=x": r"data has train, .+ describes them\); there is also a group evaluation",
    "algo.lambda=1": r"did you mean 'algo\.lambd', which exists only under algo=ppo\?",
    "algo.lam=1": r"did you mean 'algo\.lambd', which exists only under algo=ppo\?",
    "algo.cliprange=1": r"did you mean 'algo\.eps_clip'\?",
    "algo.clip_ratio_high=1": r"did you mean 'algo\.eps_clip_high'\?",
    "algo.adv_estimator=gae": r"the algorithm is chosen with algo=NAME, such as algo=grpo",
    "parallel.tensor_model_parallel_size=2": r"did you mean 'parallel\.tp'\?",
    "actor_rollout_ref.rollout.n=2": r"did you mean 'rollout\.n_samples_per_prompt'\?",
    "rollout.rollout_batch_size=2": r"did you mean 'rollout\.batch_size'\?",
    "algo.type=x": r"algo has name, .+ describes them\)",  # the word alone does not tell which of verl's keys is meant
    "loss.name=x": r"the groups are model, .+, run; python train\.py --help GROUP lists the keys of one",
}


@pytest.mark.parametrize("override", KEYS)
def test_an_unknown_key_is_answered_by_a_similar_one_or_the_keys_of_its_group(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([override], files=False)
    pattern = rf"{re.escape(override)} is unknown( under algo=grpo)?: {KEYS[override]}"
    assert re.fullmatch(pattern, str(error.value)), error.value


def test_a_key_of_the_chosen_algorithm_is_suggested_without_a_condition() -> None:
    with pytest.raises(ConfigError, match=r"^algo\.lam=1 is unknown under algo=ppo: did you mean 'algo\.lambd'\?$"):
        load_config(["algo=ppo", "algo.lam=1"], files=False)


def test_other_names_lead_to_existing_keys() -> None:
    assert set(_our_keys().values()) - set(known_keys()) == set()
    assert our_key("algo.loss_agg_mode") == "algo.aggregation"
    assert our_key("optim.betas") is None, "two of our keys have the name"


@pytest.mark.parametrize("key", ["rollout.gpu_memory_utilization", "actor_rollout_ref.rollout.gpu_memory_utilization"])
def test_a_free_mapping_is_not_suggested_for_a_key_with_one_value(key: str) -> None:
    assert our_key(key) is None and set(_our_keys().values()) & free_keys() == set()
    with pytest.raises(ConfigError, match=f"^{re.escape(key)}=0.5 is unknown: (?!did you mean)"):
        load_config([f"{key}=0.5"], files=False)


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--fancy-flag", "python train.py --help lists flags and keys"),
        ("--num-rollouts=3", "did you mean '--num-rollout'?"),
        ("--sglang-page-siz=3", "did you mean '--sglang-page-size'?"),
    ],
)
def test_an_unknown_flag_is_answered_by_a_similar_one_or_the_help(flag: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        translate([flag])
    assert str(error.value).startswith(flag.partition("=")[0]) and str(error.value).endswith(f": {hint}")
