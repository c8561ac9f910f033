"""A table entry whose function is missing or has a wrong signature ends in one message before a process starts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.config.load.loader import load_config
from slime_like.config.schema import known, names
from slime_like.errors import ConfigError
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
