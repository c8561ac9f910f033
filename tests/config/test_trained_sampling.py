"""SGLang keys and variables that change sampling: refused in training, and all of them classified."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.rules import foreign
from slime_like.config.rules.trained_sampling import (
    CHANGES_SAMPLES,
    CHANGES_SAMPLES_BY_VARIABLE,
    check_drafts,
    check_replayed_sampling,
    check_trained_sampling,
)
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

LISTED = Path(__file__).parent / "sglang_fields.txt"
VARIABLES = Path(__file__).parent / "sglang_environment.txt"
SAMPLING_PATTERN = "SIMULAT|SAMPL|ACC(EPT)?_|GREEDY|VERIFY|REJECT|PERTURB|ORACLE|THINK|LOGPROB|REVERT|SKIP_IO"
OTHER_VALUES: dict[str, object] = {"bool": True, "int": 7, "float": 0.25, "Optional[int]": 7, "Optional[str]": "x"}
VALUES: dict[str, object] = {
    "preferred_sampling_params": '{"min_p": 0.5}',
    "sampling_backend": "token_oracle",
    "json_model_override_args": '{"rope_theta": 7}',
    "forward_hooks": [{"name": "x"}],
    "ep_dispatch_algorithm": "fake",
    "modelopt_quant": "fp8",
}


def test_every_field_of_sglang_is_classified() -> None:
    names = [line for line in LISTED.read_text().splitlines() if line and not line.startswith("#")]
    fields = {name for name in foreign.table(foreign.SGLANG) if not name.startswith("_")}
    classified = [*names, *CHANGES_SAMPLES, *foreign.OWNED[foreign.SGLANG]]
    new_names, removed_names = sorted(fields - set(classified)), sorted(set(classified) - fields)
    assert not new_names, (
        f"read what these do in {foreign.source(foreign.SGLANG)}: CHANGES_SAMPLES, or {LISTED.name}: {new_names}"
    )
    assert not removed_names, f"{foreign.source(foreign.SGLANG)} no longer has {removed_names}"
    assert len(classified) == len(set(classified)), "a field is classified once"


@pytest.mark.parametrize("field", CHANGES_SAMPLES)
def test_keys_that_change_samples_are_refused_in_training(field: str) -> None:
    cfg = TrainConfig()
    cfg.rollout.sglang = {field: VALUES.get(field) or OTHER_VALUES[foreign.table(foreign.SGLANG)[field]["type"]]}
    foreign.check_foreign("rollout.sglang", cfg.rollout.sglang)
    with pytest.raises(
        ConfigError, match=rf"^rollout\.sglang\.{field}=.* cannot be trained on: .*; remove rollout\.sglang\.{field} "
    ):
        check_trained_sampling(cfg, {})
    cfg.run.mode = "rollout_only"
    check_trained_sampling(cfg, {})


def test_every_sampling_variable_of_sglang_is_classified() -> None:
    lines = [line for line in VARIABLES.read_text().splitlines() if line and not line.startswith("#")]
    variables, sglang = {*lines, *CHANGES_SAMPLES_BY_VARIABLE}, sglang_variables()
    new = {name for name in sglang if re.search(SAMPLING_PATTERN, name)} - variables
    assert not new, f"read what these do in sglang: CHANGES_SAMPLES_BY_VARIABLE, or {VARIABLES.name}: {sorted(new)}"
    assert not variables - sglang, f"{foreign.source(foreign.SGLANG)} no longer has {sorted(variables - sglang)}"
    assert len(variables) == len(lines) + len(CHANGES_SAMPLES_BY_VARIABLE), "a variable is classified once"


def sglang_variables() -> set[str]:
    """Return the environment variables that SGLang declares, without importing it."""
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations
    source = (Path(sglang.submodule_search_locations[0]) / "srt" / "environ.py").read_text()
    (environment_class,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Envs"]
    return {ast.unparse(node.targets[0]) for node in environment_class.body if isinstance(node, ast.Assign)}


@pytest.mark.parametrize("variable", CHANGES_SAMPLES_BY_VARIABLE)
def test_variables_that_change_samples_are_refused_in_training(variable: str) -> None:
    cfg = TrainConfig()
    for value in ("0", "-1", "false", ""):
        check_trained_sampling(cfg, {variable: value})
    with pytest.raises(
        ConfigError, match=rf"^{variable}=1 in the environment.* cannot be trained on: .*; unset {variable} "
    ):
        check_trained_sampling(cfg, {variable: "1"})
    for mode in ("rollout_only", "train_only"):
        cfg.run.mode = mode
        check_trained_sampling(cfg, {variable: "1"})


def test_the_variables_of_a_run_are_checked_at_load(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load_config(argv)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    with pytest.raises(ConfigError, match=r"^SGLANG_SIMULATE_ACC_LEN=2\.5 in the environment"):
        load_config(argv)


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ("{temperature: 0.7}", r"sampled at rollout\.temperature=0\.7 .*is 1\.0: .*; set rollout\.temperature=0\.7"),
        ("{top_p: 0.9}", r"sampled at rollout\.top_p=0\.9 .*; sample them again"),
        (
            "{sglang: {enable_watermark: true}}",
            r"sampled with rollout\.sglang\.enable_watermark=True .*; sample them again",
        ),
        (
            "{sglang: abc}",
            r"config\.yaml contains 'abc' as rollout\.sglang, not a mapping; remove this file to replay unchecked",
        ),
        ("{sglang: [1]}", r"config\.yaml contains \[1\] as rollout\.sglang, not a mapping"),
        ("3", r"config\.yaml contains 3 as rollout, not a mapping"),
        ("[", r"config\.yaml cannot be read as YAML .*; remove this file to replay unchecked"),
    ],
)
def test_rollouts_of_another_distribution_are_not_replayed(rollout: str, words: str, tmp_path: Path) -> None:
    cfg = TrainConfig()
    (tmp_path / "config.yaml").write_text(f"rollout: {rollout}\n")
    with pytest.raises(ConfigError, match=words):
        check_replayed_sampling(cfg, tmp_path / "rollouts")
    (tmp_path / "config.yaml").write_text("rollout: {temperature: 1.0, top_k: -1, sglang: {page_size: 1}}\n")
    check_replayed_sampling(cfg, tmp_path / "rollouts")
    (tmp_path / "config.yaml").unlink()
    check_replayed_sampling(cfg, tmp_path / "rollouts")


def test_replayed_rollouts_may_be_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("rollout: {temperature: 0.7}\n")
    monkeypatch.chdir(tmp_path / "rollouts")
    with pytest.raises(ConfigError, match=r"run\.replay_from='\.' contains rollouts that were sampled at .*=0\.7"):
        check_replayed_sampling(TrainConfig(), Path("."))


def refusal(sglang: dict[str, object]) -> str:
    """Return the reason why samples of engines with these arguments cannot be trained on, or an empty string."""
    cfg = TrainConfig()
    cfg.rollout.sglang = sglang
    try:
        check_trained_sampling(cfg, {})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculative_accept_threshold_acc", 1.0),
        ("speculative_accept_threshold_single", 1),
        ("sampling_backend", "pytorch"),
        ("ep_dispatch_algorithm", "dynamic"),
        ("enable_watermark", False),
        ("preferred_sampling_params", None),
        ("speculative_algorithm", "NGRAM"),
    ],
)
def test_values_that_change_nothing_pass(field: str, value: object) -> None:
    assert refusal({field: value}) == ""


def test_speculative_drafts_are_refused_on_a_cpu() -> None:
    cfg = TrainConfig()
    check_drafts(cfg, "cpu")
    cfg.rollout.sglang = {"speculative_algorithm": "NGRAM"}
    check_drafts(cfg, "cuda")
    for mode in ("train", "rollout_only"):
        cfg.run.mode = mode
        with pytest.raises(
            ConfigError, match=r"speculative_algorithm=NGRAM with placement.device=cpu.*remove rollout\.sglang"
        ):
            check_drafts(cfg, "cpu")
    cfg.run.mode = "train_only"  # without engines
    check_drafts(cfg, "cpu")


def test_a_link_to_rollouts_is_checked_with_the_config_in_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("rollout: {temperature: 0.7}")
    (run / "rollouts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"sampled at .*=0\.7"):
        check_replayed_sampling(TrainConfig(), run / "rollouts")
