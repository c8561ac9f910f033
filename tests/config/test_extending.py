"""Extension points: a part of each kind is added from outside the package as docs/extending.md describes."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.load.loader import from_yaml, load_config, to_yaml
from slime_like.config.schema import names
from slime_like.errors import ConfigError, UserCodeError
from slime_like.metrics.sinks import open_sinks
from slime_like.metrics.types import RunWarning
from slime_like.registry import resolve
from slime_like.reward.check import load_reward
from slime_like.rollout.collect.group_filters import GroupFilters
from slime_like.rollout.collect.sampler import open_generate
from tests.config.bad_input import message
from tests.config.model_folder import write_model

OWN_CODE = """
from own_helper import SCORE

def score(prompt, sample):
    return SCORE

def short(group):
    return "long"

async def play(prompt, engine, seeds, context):
    return []

class Source:
    def __init__(self, config, context):
        self.config = config
    def __len__(self):
        return 0
    def next(self, num_prompts):
        return []
    def metrics(self):
        return ()
    def state(self):
        return {}
    def load_state(self, state):
        pass

class Sink:
    def __init__(self, config, context):
        self.file = open(context.run_dir / "own.csv", "a")
    def log(self, step, values, spans):
        self.file.write(f"{step},{values['reward']}\\n")
    def warn(self, step, warning):
        self.file.write(f"{step},{warning.text}\\n")
    def close(self):
        self.file.close()

async def agent(base_url, api_key, prompt, metadata):
    return None
"""
PATHS = ("own_parts.py", "own_parts")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a user module and its helper."""
    (tmp_path / "own_parts.py").write_text(OWN_CODE)
    (tmp_path / "own_helper.py").write_text("SCORE = 0.25\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("own_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("source", PATHS)
def test_rollout_parts_are_loaded_from_a_file_or_module_of_the_current_directory(
    source: str, argv: list[str], folder: Path
) -> None:
    lines = {"reward.name": "score", "rollout.generate": "play", "data.source": "Source"}
    lists = {"rollout.filters": "short", "metrics.sinks": "Sink"}
    values = {key: f"{source}:{name}" for key, name in lines.items()}
    values |= {key: f"[{source}:{name}]" for key, name in lists.items()}
    cfg = load_config([*argv, *(f"{key}={value}" for key, value in values.items())], files=False)
    reward: Any = load_reward("reward.name", cfg.reward.name)
    assert reward(None, None) == 0.25
    assert open_generate(cfg.rollout) is not None
    assert resolve("data.source", cfg.data.source, names.DATA_SOURCES)(cfg.data, None).config is cfg.data
    (rule,) = cfg.rollout.filters
    assert resolve("rollout.filters", rule, names.FILTERS)(None) == "long"
    GroupFilters(cfg.rollout)
    sinks = open_sinks(cfg.metrics, folder, first_step=0, num_steps=2, console=io.StringIO())
    sinks.warn(1, RunWarning("slow"))
    sinks.note("a note, which this sink does not show")
    sinks.log(1, {"reward": 0.5}, {})
    with pytest.raises(
        UserCodeError, match=r"metrics\.sinks=.*:Sink raised KeyError: 'reward' \(.*own_parts.py:\d+\), for step 2"
    ):
        sinks.log(2, {}, {})
    sinks.close()
    assert (folder / "own.csv").read_text() == "1,slow\n1,0.5\n"


def test_a_file_is_found_from_every_directory(argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "reward.name=own_parts.py:score",
        "rollout.filters=[own_parts.py:short]",
        "metrics.sinks=[own_parts.py:Sink]",
    ]
    cfg = load_config([*argv, *lines], files=False)
    file = folder / "own_parts.py"
    assert (cfg.reward.name, cfg.rollout.filters) == (f"{file}:score", [f"{file}:short"])
    monkeypatch.chdir("/")
    assert from_yaml(to_yaml(cfg)) == cfg


WRONG_SINKS = {
    "Source": "has no method log(step, values, spans)",
    "score": "raised AttributeError: ",  # a function: called when the run starts
    "short": "cannot be called as sink(config, context)",
    "Deaf": "cannot be called as log(step, values, spans)",
}


@pytest.mark.parametrize("name", WRONG_SINKS)
def test_a_sink_that_does_not_fit_is_named_before_a_process_starts(name: str, argv: list[str], folder: Path) -> None:
    with (folder / "own_parts.py").open("a") as file:
        file.write(
            "class Deaf(Sink):\n    def log(self, step): ...\n\ndef score(config, context):\n    return config.x\n"
        )
    with pytest.raises(ConfigError) as error_info:
        cfg = load_config([*argv, f"metrics.sinks=[own_parts.py:{name}]"], files=False)
        open_sinks(cfg.metrics, folder, first_step=0, num_steps=2, console=io.StringIO())
    text = str(error_info.value)
    assert "metrics.sinks='" in text and f":{name}'" in text and WRONG_SINKS[name] in text and "own_parts.py:" in text


WRONG_RETURNS = {
    "rollout.filters=[{}:keeps]": ("returns len(group.samples) > 1", "a filter returns None to keep a group"),
    "metrics.sinks=[{}:opens]": (
        "returns None",
        "must return an object with the methods log(step, values, spans), close()",
    ),
    "data.source={}:opens": ("returns None", "must return an object with the methods __len__(), next(num_prompts)"),
}


@pytest.mark.parametrize("line", WRONG_RETURNS)
def test_a_function_that_returns_a_wrong_type_is_named_with_its_line(line: str, argv: list[str], folder: Path) -> None:
    with (folder / "own_parts.py").open("a") as file:
        file.write("def keeps(group):\n    return len(group.samples) > 1\n\ndef opens(config, context):\n    pass\n")
    text = message(argv, line.format("own_parts.py"), files=False)
    assert all(words in text for words in (*WRONG_RETURNS[line], f"({folder}/own_parts.py:"))


def test_an_agent_and_a_weighted_reward_come_from_a_file(argv: list[str], folder: Path) -> None:
    agent = ["rollout.generate=openai_agent", "rollout.agent=own_parts.py:agent"]
    cfg = load_config([*argv, *agent, r"reward.weights={own_parts.py\:score: 0.5}"], files=False)
    assert cfg.reward.weights == {f"{folder / 'own_parts.py'}:score": 0.5}


def test_a_missing_file_is_named(argv: list[str], folder: Path) -> None:
    text = message(argv, "reward.name=own_part.py:score", files=False)
    assert text == f"reward.name='own_part.py:score': there is no file own_part.py in {folder}: correct the path"
    text = message(argv, f"reward.name={folder}/no/own_part.py:score", files=False)
    assert text.endswith(f"': there is no file {folder}/no/own_part.py: correct the path")


@pytest.mark.parametrize("source", PATHS)
def test_an_import_that_fails_inside_a_module_is_named_with_its_line(
    source: str, argv: list[str], folder: Path
) -> None:
    (folder / "own_helper.py").write_text("\nimport own_absent\n")
    text = message(argv, f"reward.name={source}:score", files=False)
    assert (
        f"raised ModuleNotFoundError: No module named 'own_absent' ({folder}/own_helper.py:2): install own_absent"
        in text
    )


NO_PREPARE = {
    "own_part.py:make": "there is no file own_part.py in ",
    "no_such_package.inputs:make": "No module named 'no_such_package'",
    "own_parts.py:": "has no name of a function after the colon",
}


@pytest.mark.parametrize("path", NO_PREPARE)
def test_a_missing_prepare_is_refused_at_load(path: str, argv: list[str], folder: Path) -> None:
    text = message(argv, f"run.prepare={path}", files=False)
    assert text.startswith("run.prepare='") and NO_PREPARE[path] in text


def test_prepare_is_not_imported_at_load(argv: list[str], folder: Path) -> None:
    (folder / "own_inputs.py").write_text("raise ValueError('imported')\n")
    for path in ("own_inputs.py:make", "own_inputs:make"):
        load_config([*argv, f"run.prepare={path}"], files=False)


PARTS = {
    "model.attention": (names.ATTENTIONS, "Attention"),
    "model.gdn.backend": (names.GDN_BACKENDS, "Backend"),
}


@pytest.mark.parametrize("key", PARTS)
def test_a_table_entry_adds_a_model_part(
    key: str, argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, kind = PARTS[key]
    (folder / "own_model.py").write_text(f"class {kind}:\n    pass\n")
    monkeypatch.syspath_prepend(folder)  # an installed package
    assert "'mine'" in message(argv, f"{key}=mine", files=False)
    monkeypatch.setitem(table, "mine", f"own_model:{kind}")
    load_config([*argv, f"{key}=mine"], files=False)
    assert resolve(key, "mine", table).__name__ == kind


@pytest.mark.parametrize("mode", ["colocated", "split"])
def test_a_table_entry_adds_a_transport_for_its_placement(
    mode: str, argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other_table = names.COLOCATED_TRANSPORTS, names.SPLIT_TRANSPORTS
    if mode == "split":
        table, other_table = other_table, table
    line = f"placement.mode={mode} weights.transport=mine"
    assert "'mine' is unknown" in message(argv, line, files=False)
    monkeypatch.setitem(table, "mine", "own_parts:Source")
    assert load_config([*argv, *line.split()], files=False).weights.transport == "mine"
    monkeypatch.delitem(table, "mine")
    monkeypatch.setitem(other_table, "mine", "own_parts:Source")
    assert f"with placement.mode={mode}" in message(argv, line, files=False)


ADD_FAMILY = """
import json, sys
from pathlib import Path
from slime_like.config.schema import names
from slime_like.config.schema.family_entry import FamilyEntry
names.FAMILIES["mine"] = FamilyEntry(
    "own_family:Mine", output_gate=True, engine_ties=False, fused_engine_model="MineForCausalLM", bitwise=True
)
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import CheckpointError
from slime_like.metrics.flops import decoder_shape
from slime_like.train.megatron.families.base import family_class
from slime_like_plugins.sglang_cpu.structure import MODELS

folder = Path(sys.argv[1])
argv = [*sys.argv[2:], f"model.hf_checkpoint={folder}", "run.deterministic=true"]
plan = make_plan(load_config(argv), Machine(0, 4, 16 * 2**30, ()))
print(plan.actor.deterministic, family_class("mine").__name__, "MineForCausalLM" in MODELS)
config = json.loads((folder / "config.json").read_text())
print(decoder_shape(config).output_gate)
(folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
try:
    load_config(argv)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_line_in_the_table_of_families_adds_a_family(argv: list[str], folder: Path) -> None:
    """The family is added in a new process, because the plugin reads the table when it is imported."""
    code = "from slime_like.train.megatron.families.qwen3 import Qwen3\nclass Mine(Qwen3):\n    pass\n"
    (folder / "own_family.py").write_text(code)
    model = write_model(folder / "model", model_type="mine")
    assert "model_type 'mine', which is not supported" in message(argv, f"model.hf_checkpoint={model}", files=True)
    command = [sys.executable, "-c", ADD_FAMILY, str(model), *argv]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[:2] == ["True Mine True", "True"], process.stderr
    assert "SGLang's mine does not read: its output layer would stay uninitialised" in process.stdout


OWN_ALGORITHM = """
from dataclasses import dataclass
from slime_like.config.schema.algo import GrpoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.config.schema.base import key

@dataclass(kw_only=True)
class MineConfig(GrpoConfig):
    loss: str = key("mine", "Token loss.")
    warmth: float = key(0.5, "Weight of something.")

@dataclass(kw_only=True)
class WithoutClip(PolicyConfig):
    group_advantage: str | None = key("grpo", "Advantage from the rewards of a group.")

@dataclass(kw_only=True)
class WithoutAdvantage(PolicyGradientConfig):
    pass

def kl(logprobs_T, ref_logprobs_T):
    return logprobs_T - ref_logprobs_T

class Loss:
    needs_entropy = False

    def __init__(self, config):
        self.warmth = config.warmth

    def __call__(self, view):
        return None
"""
LOAD_OWN_ALGORITHM = """
import sys
from slime_like.config.schema import names
names.ALGORITHMS["mine"] = "own_algo:MineConfig"
names.ALGORITHMS["without_clip"] = "own_algo:WithoutClip"
names.ALGORITHMS["without_advantage"] = "own_algo:WithoutAdvantage"
names.LOSSES["mine"] = "own_algo:Loss"
names.LOSSES["missing"] = "own_algo:Los"
names.KL_ESTIMATORS["mine"] = "own_algo:kl"
from slime_like.config.load.loader import from_yaml, load_config, to_yaml
from slime_like.errors import ConfigError

def refused(*extra):
    try:
        load_config([*sys.argv[1:], *extra], files=False)
    except ConfigError as error:
        print(error)

cfg = load_config(
    [*sys.argv[1:], "algo=mine", "algo.warmth=0.25", "algo.kl_loss_type=mine", "algo.kl_loss_coef=0.1"], files=False
)
assert from_yaml(to_yaml(cfg)) == cfg
print(cfg.algo.name, cfg.algo.loss, cfg.algo.warmth, cfg.algo.kl_loss_type)
refused("algo=without_clip")
refused("algo=without_advantage")
refused("algo=without_advantage", "algo.group_advantage=grpo")
refused("algo.loss=mine")
refused("algo.loss=missing")
names.LOSSES["mine"] = names.LOSSES["missing"]
refused("algo=mine")
names.KL_ESTIMATORS["mine"] = "own_algo:Loss"
refused("algo.kl_loss_type=mine", "algo.kl_loss_coef=0.1")
"""


def test_a_table_entry_adds_an_algorithm(argv: list[str], folder: Path) -> None:
    """The algorithm is added in a new process, because the config reads the tables when it is imported."""
    (folder / "own_algo.py").write_text(OWN_ALGORITHM)
    command = [sys.executable, "-c", LOAD_OWN_ALGORITHM, *argv]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    loaded, *refusals = result.stdout.splitlines()
    assert loaded == "mine mine 0.25 mine"
    no_advantage = "own_algo:WithoutAdvantage has neither group_advantage nor token_advantage"
    expected = (
        "own_algo:WithoutClip has loss='policy_gradient', which reads keys of PolicyGradientConfig",
        no_advantage,
        no_advantage,
        "choose the algorithm with algo=mine",
        f"algo.loss='missing': module 'own_algo' ({folder}/own_algo.py) has no 'Los'; did you mean 'Loss'?",
        f"algo.loss='mine': module 'own_algo' ({folder}/own_algo.py) has no 'Los'; did you mean 'Loss'?",
        "algo.kl_loss_type='mine' cannot be called as estimator(logprobs_T, ref_logprobs_T) -> kl_T",
    )
    for text, words in zip(refusals, expected, strict=True):
        assert words in text
