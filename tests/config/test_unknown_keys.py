"""Hints about unknown keys and flags: a similar name, or the place where the names are listed."""

import re

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from slime_like_compat.flags.translate import translate

# key=value -> pattern of the hint
KEYS = {
    "rollout.n_samples=1": r"did you mean 'rollout\.n_samples_per_prompt'\?",
    "rolout.batch_size=1": r"did you mean 'rollout\.batch_size'\?",
    "algo.lr=1": r"did you mean 'optim\.lr' or 'critic\.lr'\?",
    "rollout.port=1": r"rollout has batch_size, .+, remote_experts\.\*, .+ \(python train\.py --help rollout describes them\)",
    "data.eval=x": r"data has train, .+ describes them\); there is also a group evaluation",
    "loss.name=x": r"the groups are model, .+, run; python train\.py --help GROUP lists the keys of one",
}


@pytest.mark.parametrize("override", KEYS)
def test_an_unknown_key_is_answered_by_a_similar_one_or_the_keys_of_its_group(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([override], files=False)
    pattern = rf"{re.escape(override)} is unknown( under algo=grpo)?: {KEYS[override]}"
    assert re.fullmatch(pattern, str(error.value)), error.value


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
