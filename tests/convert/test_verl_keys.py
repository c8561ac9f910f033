"""verl keys: every key in verl's example scripts is mapped or explained, and its default is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.base import default_of
from slime_like.config.schema.known import ALGORITHMS, known_keys
from slime_like.errors import ConfigError
from slime_like_compat.verl.defaults import CORRECTION, DIFFERENT, VALUES
from slime_like_compat.verl.features import NOT_HERE, READ_WITH
from slime_like_compat.verl.launch import read_verl
from slime_like_compat.verl.mapping import setting_of_text, translate_settings
from slime_like_compat.verl.names import LEGACY, canonical, feature, switch, without_effect
from slime_like_compat.verl.without_effect import WITHOUT_EFFECT
from slime_like_compat.verl_keys import VERL_KEYS
from tests.convert.verl_lines import FILTER, METRIC, OVERLONG, REWARD, A, M, R, settings_of, translated, value

RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_router_topk",
)
KEYS = Path(__file__).parent / "verl" / "keys.txt"


def is_explained(key: str) -> bool:
    mapped_names = {name.strip() for names in VERL_KEYS for name in names.split(",")}
    name = canonical(key)
    passed_through = (
        f"{M}.override_transformer_config.",
        f"{R}.engine_kwargs.sglang.",
        "data.apply_chat_template_kwargs.",
    )
    is_mapped = key in mapped_names or name in mapped_names or name in VALUES or name.startswith(passed_through)
    return is_mapped or any(lookup(name) is not None for lookup in (switch, without_effect, feature))


def test_keys_of_the_example_scripts_are_mapped_or_explained() -> None:
    keys = [line for line in KEYS.read_text().splitlines() if not line.startswith("#")]
    unexplained_keys = [key for key in keys if not is_explained(key)]
    assert len(keys) > 450
    assert unexplained_keys == []


def test_a_setting_given_twice_on_a_line_has_its_keys_in_the_row_of_the_last() -> None:
    rows = [row for row in translated(f"{A}.ppo_mini_batch_size=32").rows if row.flag == f"{A}.ppo_mini_batch_size"]
    assert [(row.value_text, row.verdict) for row in rows] == [("16", "dropped"), ("32", "mapped")]
    assert [row.keys for row in rows] == [(), ("loop.steps_per_rollout", "loop.global_batch_size")]


def test_keys_of_the_page_are_read() -> None:
    keys = [name.strip() for names in VERL_KEYS for name in names.split(",")]
    assert sorted(set(VALUES) - set(keys) - {"reward_model.ground_truth (column)", "extra_info (column)"}) == []
    for key in keys:
        example = VALUES.get(canonical(key), "{}" if key.endswith(("kwargs", "config", "sglang")) else 1)
        text = "null" if example is None else str(example).replace(" ", "")
        job = translated(f"data.train_batch_size=256 {key}={text}")
        assert [row.verdict for row in job.rows if row.flag == key][-1] != "unknown", key


SCRIPTS = (
    f"algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True {A}.use_kl_loss=True {A}.optim.lr_decay_style=wsd "
    f"{A}.optim.lr_wsd_decay_steps=2 critic.optim.lr_decay_style=wsd critic.optim.lr_wsd_decay_steps=2 "
    "trainer.total_training_steps=null",
    f"{FILTER} {METRIC}=acc {OVERLONG} {CORRECTION}.rollout_is=token {CORRECTION}.rollout_rs=seq_mean_k1 "
    f"{CORRECTION}.rollout_rs_threshold=2.0 {A}.optim.override_optimizer_config.optimizer_cpu_offload=True",
    "data.val_files=v.parquet trainer.test_freq=5 trainer.logger=[console,wandb] "
    f"trainer.v1.trainer_mode=separate_async {R}.nnodes=1 {M}.override_transformer_config.recompute_granularity=full",
    f"{A}.policy_loss.loss_mode=gspo {A}.use_dynamic_bsz=True {CORRECTION}.bypass_mode=True "
    f"{M}.override_transformer_config.recompute_granularity=selective",
)
ODD = ("0", "null", "text", "[]", "{}")
ODDER = ("inf", "nan", "true", "1" * 400, "[1]", "[null]", "-1")


def read_keys() -> list[str]:
    """Return every key that the converter reads, including former names."""
    parts = [f"{M}.override_transformer_config.{name}" for name in RECOMPUTE]
    keys = [name.strip() for names in VERL_KEYS for name in names.split(",")]
    older_names = [name for name in LEGACY if not name.endswith(".")]
    return [*dict.fromkeys(name for name in (*keys, *VALUES, *parts, *older_names) if "(" not in name)]


@pytest.mark.parametrize("job", SCRIPTS)
def test_no_value_of_a_key_ends_in_a_traceback_or_text(job: str) -> None:
    keys, base = read_keys(), settings_of(job)
    values = {text: setting_of_text(f"a.b={text}", "run.sh:1") for text in (*ODD, *ODDER)}
    assert len(keys) > 150
    odd_pairs = zip(keys, itertools.cycle(ODDER), strict=False)
    for key, text in (*itertools.product(keys, ODD), *odd_pairs):
        try:
            result = translate_settings([*base, replace(values[text], name=key)], user_overrides=[REWARD])
        except ConfigError as error:
            names = {name.rpartition(".")[2] for name in (key, canonical(key))}
            assert any(name in str(error) for name in names), (key, text)
            continue
        assert not {"None", "'None'", "'[]'", "'{}'", "inf", "nan"} & {*result.overrides.values()}, (key, text)


@pytest.mark.parametrize("defaults", ["3", "", "{a: b}", "[[]]", "[null]", "text"])
def test_defaults_of_a_yaml_file_are_a_list_of_known_names(defaults: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"defaults: {defaults}\ntrainer: {{nnodes: 1}}\n")
    with pytest.raises(ConfigError, match=r"job\.yaml.* has defaults: .*: write a list|job\.yaml: defaults contains"):
        read_verl(tmp_path / "job.yaml", [], variables={}, skip=[])


def test_each_pattern_has_the_name_by_which_keys_are_looked_up() -> None:
    patterns = {pattern for table in (WITHOUT_EFFECT, NOT_HERE, READ_WITH) for pattern in table}
    assert {pattern: name for pattern in patterns if (name := canonical(pattern)) != pattern} == {}


def test_no_pattern_hides_a_key_that_is_mapped() -> None:
    assert [key for key in VALUES if key in WITHOUT_EFFECT or key in NOT_HERE] == []


@pytest.mark.parametrize("item", DIFFERENT, ids=lambda item: item.key)
def test_differing_defaults_match_the_schema(item: Any) -> None:
    if item.our_key == "algo":
        assert next(iter(ALGORITHMS)) == item.our_value
    else:
        assert default_of(known_keys()[item.our_key]) == item.our_value


def test_differing_defaults_are_written() -> None:
    shortest = [
        "data.train_files=d.parquet",
        "actor_rollout_ref.model.path=m",
        f"{A}.use_kl_loss=True",
        "algorithm.use_kl_in_reward=True",
    ]
    job = translate_settings([setting_of_text(text, "x:1") for text in shortest], user_overrides=[REWARD])
    written_defaults = {row.flag for row in job.rows if row.verdict == "default"}
    engine_only = {f"{A}.ppo_max_token_len_per_gpu", f"{R}.max_num_seqs"}  # memory and speed of verl's own engines
    assert {item.key for item in DIFFERENT} - written_defaults == engine_only
    assert value(job, "algo.name") == "ppo" and value(job, "rollout.batch_size") == 1024


def test_all_unknown_command_outputs_are_reported_together() -> None:
    names = [name.strip() for names in VERL_KEYS for name in names.split(",")]
    names.remove("data.reward_fn_key")  # answered by REWARD
    reason = "is the output of $(date), and no command is run: write its value"
    unknown = [setting_of_text(f"{name}=$(date)", f"run.sh:{line}", reason) for line, name in enumerate(names, 1)]
    rows = translate_settings([*unknown, *settings_of("")], user_overrides=[REWARD]).rows
    needed_flags = [row.flag for row in rows if row.verdict == "needed"]
    given_again = {row.flag for row in rows if row.note.startswith("given again")}
    assert len(needed_flags) > 70 and {"trainer.save_freq", f"{R}.tensor_model_parallel_size", f"{A}.optim.lr"} <= {
        *needed_flags
    }
    assert {row.verdict for row in rows if row.flag in names and row.flag not in {*needed_flags, *given_again}} == {
        "dropped"
    }
    for name in names:
        [row] = [
            row
            for row in translate_settings([setting_of_text(f"{name}=$(x)", "run.sh:1", reason)]).rows
            if row.file_line
        ]
        assert row.verdict in ("needed", "dropped", "refused"), name
