"""A table entry whose function is missing or has a wrong signature ends in one message before a process starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.algo.advantage import UserGroupAdvantage, bind_group_advantage
from slime_like.algo.bind import UserCorrection, UserLoss, bind_loss, bind_off_policy
from slime_like.cluster.start.selection import open_selection
from slime_like.config.load.loader import load_config
from slime_like.config.schema import known, names
from slime_like.config.schema.policy import PolicyConfig
from slime_like.errors import ConfigError
from slime_like.metrics.types import SinkContext
from slime_like.metrics.user_sink import open_sink
from slime_like.reward.check import check_reward
from tests.config.bad_input import message


@dataclass(frozen=True, slots=True)
class TableCase:
    """A table, the name of an entry, a line that uses the entry, and the signature that a message gives."""

    table: dict[str, str]
    line: str
    signature: str
    name: str = "mine"


ENTRIES = {
    "rollout.filters": TableCase(names.FILTERS, "rollout.filters=[mine]", "filter(group)"),
    "rollout.generate": TableCase(
        names.GENERATE, "rollout.generate=mine", "async def generate(prompt, engine, seeds, context)"
    ),
    "data.source": TableCase(names.DATA_SOURCES, "data.source=mine", "source(config, context)"),
    "algo.group_advantage": TableCase(names.GROUP_ADVANTAGES, "algo.group_advantage=mine", "advantage(rewards_G)"),
    "algo.token_advantage": TableCase(  # only an algorithm whose schema names the entry can use it
        names.TOKEN_ADVANTAGES, "algo=reinforce_pp", "advantage(config)", "reinforce_pp"
    ),
    "algo.off_policy": TableCase(
        names.OFF_POLICY, "algo.off_policy=mine", "correction(config, old_logprobs, rollout_logprobs, sequences)"
    ),
    "metrics.sinks": TableCase(names.SINKS, "metrics.sinks=[mine]", "sink(config, context)"),
    "reward.name": TableCase(names.REWARDS, "reward.name=mine", "reward(prompt, sample)"),
}


@pytest.mark.parametrize("key", ENTRIES)
def test_a_table_entry_is_checked_as_a_path_is(
    key: str, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, file = ENTRIES[key], tmp_path / "own_entries.py"
    file.write_text("def four(a, b, c, d): ...\ndef three(a, b, c): ...\n")
    monkeypatch.syspath_prepend(tmp_path)  # an installed package
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    prefix = f"{key}='{case.name}'"
    monkeypatch.setitem(case.table, case.name, "own_entries:missing")
    text = message(argv, case.line, files=False)
    assert text == f"{prefix}: module 'own_entries' ({file}) has no 'missing'; known: four, three"
    monkeypatch.setitem(case.table, case.name, "own_entries:three")
    with pytest.raises(ConfigError) as error_info:
        cfg = load_config([*argv, *case.line.split()], files=False)
        check_reward(cfg.reward)  # before the run starts processes
    text = str(error_info.value)
    assert text.startswith(f"{prefix} ") and case.signature in text and "\n" not in text
    assert f"{file}:2)" in text


def test_an_entry_of_a_user_is_used_as_a_path_is(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results are checked, its errors name the key, and a group advantage may use equal rewards or a single sample."""
    for table, name in (
        (names.LOSSES, "Reinforce"),
        (names.GROUP_ADVANTAGES, "centred"),
        (names.TOKEN_ADVANTAGES, "ConstantAdvantage"),
        (names.OFF_POLICY, "halved"),
    ):
        monkeypatch.setitem(table, "mine", f"tests.config.own_algorithm:{name}")
    assert open_selection(load_config(argv, files=False), 8)._signal.baseline == "group"
    extra = ["algo.group_advantage=mine", "rollout.n_samples_per_prompt=1"]
    assert open_selection(load_config([*argv, *extra], files=False), 8)._signal.baseline == "none"
    cfg = load_config([*argv, *extra, "algo.token_advantage=mine", "algo.off_policy=mine"], files=False)
    assert isinstance(cfg.algo, PolicyConfig) and isinstance(bind_off_policy(cfg.algo), UserCorrection)
    assert isinstance(bind_group_advantage("mine"), UserGroupAdvantage)
    cfg = load_config([*argv, *extra, "algo.loss=mine"], files=False)
    assert isinstance(bind_loss(cfg.algo), UserLoss)


def test_a_sink_of_a_user_in_the_table_is_checked_when_it_is_constructed(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_sinks.py").write_text("def sink(config, context):\n    return config\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(names.SINKS, "mine", "own_sinks:sink")
    cfg = load_config([*argv, "metrics.sinks=[mine]"], files=False)
    with pytest.raises(ConfigError, match=r"^metrics\.sinks='mine' has no method log\(step, values, spans\): add it"):
        open_sink("mine", cfg.metrics, SinkContext(tmp_path, 0, 2, {}))


def test_a_schema_is_a_subclass_of_algo_config_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_schemas.py").write_text("class Schema: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    cases = {
        "own_schemas.py:Schema": ", a file: name the module, 'own_schemas:Schema', and put its folder on PYTHONPATH",
        "own_schemas:Schema": ", which is not a subclass of AlgoConfig: name a schema (docs/extending.md, Algorithm)",
        "own_schemas:Scheme": " has no 'Scheme'; did you mean 'Schema'?",
    }
    for path, words in cases.items():
        monkeypatch.setitem(names.ALGORITHMS, "mine", path)
        with pytest.raises(ConfigError) as error_info:
            known._schema("mine")
        assert str(error_info.value).startswith("algo='mine': ") and str(error_info.value).endswith(words)
