"""Loading a config from the command line: composition, quoting, round trip, sealing and light imports."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from slime_like.config.load.loader import _compose_shipped, _copy, _hydra, from_yaml, load_config, show, to_yaml
from slime_like.config.load.paths import config_folder
from slime_like.config.schema import algo, policy, role_algo
from slime_like.config.schema.known import ALGORITHMS, known_keys
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.deadline import scale
from slime_like_compat.flags.translate import render
from tests.config.bad_input import refusal
from tests.pickled_copies import pickled_copy

PARSER = OverridesParser.create()
ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (config_folder() / "recipe").glob("*.yaml"))
HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "datasets")
SFT = ["algo=sft", "rollout.n_samples_per_prompt=1"]
WITHOUT_GPU = {"qwen3_5_35b_a3b": ("model.gdn.backend=torch",)}
NEEDS = {"sft": SFT, "distill": ["algo=distill", "teacher.hf_checkpoint=${model.hf_checkpoint}"]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_reads_back(recipe: str) -> None:
    cfg = load_config([f"+recipe={recipe}", *WITHOUT_GPU.get(recipe, ())], files=False)
    assert cfg.run.name == recipe
    assert from_yaml(to_yaml(cfg)) == cfg


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_loads(name: str, argv: list[str]) -> None:
    cfg = load_config([*argv, *NEEDS.get(name, (f"algo={name}",))])
    assert type(cfg.algo) is ALGORITHMS[name]
    assert cfg.algo.name == name


def unlisted_schemas(table: Mapping[str, type], *modules: ModuleType) -> set[type]:
    """Return the schemas of algorithms that ``modules`` define and ``table`` lacks."""
    schemas = {c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__}
    return {schema for schema in schemas if issubclass(schema, policy.AlgoConfig)} - set(table.values())


def test_every_schema_belongs_to_one_algorithm() -> None:
    """A schema may be in a file of its own."""
    table: dict[str, type] = {**ALGORITHMS, "mine": type("MineConfig", (algo.GrpoConfig,), {})}
    assert unlisted_schemas(table, algo, role_algo) == set()
    assert len(set(table.values())) == len(table)
    del table["cispo"]
    assert unlisted_schemas(table, algo, role_algo) == {algo.CispoConfig}


def test_new_keys_are_a_decision() -> None:
    """keys.txt lists all keys. After a deliberate change, write it with:

    python -c 'from slime_like.config.schema.known import *; print(*sorted(known_keys()), sep="\\n")'
    """
    frozen = (Path(__file__).parent / "keys.txt").read_text().split()
    assert sorted(known_keys()) == frozen


def test_every_key_has_help() -> None:
    assert [key for key, item in known_keys().items() if not item.metadata.get("help", "").endswith((".", ")"))] == []


def test_overrides_win_over_recipe_and_keep_their_type(argv: list[str]) -> None:
    cfg = load_config(
        [*argv, "+recipe=quickstart", "optim.lr=2", "rollout.filters=[nonzero_std,completed]"], files=False
    )
    assert (cfg.optim.lr, type(cfg.optim.lr)) == (2.0, float)
    assert cfg.rollout.filters == ["nonzero_std", "completed"]
    assert load_config([*argv, "recipe=quickstart"], files=False).run.name == "quickstart"


@pytest.mark.parametrize("path", ["a.jsonl@[0:100]", "a b.jsonl", "it's,odd=1.jsonl", "C\\d\\", "a.jsonl@[-5:]", "{x}"])
def test_paths_need_no_quotes(path: str, argv: list[str]) -> None:
    cfg = load_config([*argv, f"data.train={path}", f"evaluation.datasets.held-out={path}"], files=False)
    assert cfg.data.train == path
    assert cfg.evaluation.datasets == {"held-out": path}


@pytest.mark.parametrize("groups", [("+recipe=quickstart",), ("+recipe=quickstart_latent", "algo=ppo"), ("guard=off",)])
def test_copies_of_the_tests_equal_those_of_the_loader(groups: tuple[str, ...]) -> None:
    """The tests copy composed configs from pickles (tests/pickled_copies.py)."""
    tree = _compose_shipped(config_folder(), groups)
    pickled, copied = pickled_copy(tree), _copy(tree)  # _copy is the loader's: imported before the replacement
    assert OmegaConf.to_yaml(pickled) == OmegaConf.to_yaml(copied)
    assert [OmegaConf.get_type(tree_copy, "algo") for tree_copy in (pickled, copied)] == [
        OmegaConf.get_type(tree, "algo")
    ] * 2
    for tree_copy in (pickled, copied):
        OmegaConf.update(tree_copy, "run.seed", 7, merge=True)
        assert tree_copy.run.seed == 7 != tree.run.seed
        with pytest.raises(ConfigAttributeError, match="seeed"):
            OmegaConf.update(tree_copy, "run.seeed", 7, merge=True)
    assert pickled_copy(tree).run.seed == tree.run.seed


@pytest.mark.parametrize("groups", [(), ("+recipe=quickstart_latent", "algo=ppo")])
def test_compositions_of_the_tests_equal_those_of_hydra(
    groups: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tests Hydra copies schemas from pickles, and reads its own files and parses overrides once (tests/pickled_copies.py)."""
    faster = _hydra(config_folder(), groups)
    parse: Any = OverridesParser.parse_rule
    monkeypatch.setattr(OverridesParser, "parse_rule", parse.__wrapped__)
    read: Any = ImportlibResourcesConfigSource.load_config
    monkeypatch.setattr(ImportlibResourcesConfigSource, "load_config", read.__wrapped__)
    for name in ("load", "__deepcopy__"):
        monkeypatch.delattr(ConfigStore.instance(), name)
    for _ in range(2):  # a composition leaves the schemas as they were
        composed = _hydra(config_folder(), groups)
        assert OmegaConf.to_yaml(faster) == OmegaConf.to_yaml(composed)
        assert OmegaConf.get_type(faster, "algo") == OmegaConf.get_type(composed, "algo")


@given(st.text())
def test_rendered_text_survives_hydras_grammar(text: str) -> None:
    assert PARSER.parse_override(f"k={render(text)}").value() == text


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False), st.lists, max_leaves=8))
def test_rendered_values_survive_hydras_grammar(value: object) -> None:
    assert PARSER.parse_override(f"k={render(value)}").value() == value


@given(
    st.dictionaries(st.text("aB1_-. :=,()[]{}\\$/+*\t'é", min_size=1), st.integers() | st.text(max_size=3), max_size=3)
)
def test_rendered_mappings_survive_hydras_grammar(value: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        assert PARSER.parse_override(f"k={render({'nested': value})}").value() == {"nested": value}


@pytest.mark.parametrize("key", ["1", "1.5", "-1e3", "True", "null", "nan", "", "it's", "größe", "a\nb"])
def test_keys_without_a_form_in_hydras_grammar_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"has the key {key!r}, which cannot be written")):
        render({"a": {key: 1}})


@pytest.mark.parametrize("key", ["a:b", "two words", "a.b", "{x}", "1a", "e5", "a_1-b"])
def test_keys_with_special_characters_are_rendered(key: str) -> None:
    assert PARSER.parse_override(f"k={render({key: 1})}").value() == {key: 1}


def test_free_mappings_are_replaced_whole_or_set_key_by_key(argv: list[str]) -> None:
    argv = [*argv, "rollout.sglang.mem_fraction_static=0.5", "+rollout.sglang.page_size=16"]
    assert load_config(argv).rollout.sglang == {"mem_fraction_static": 0.5, "page_size": 16}
    assert load_config([*argv, "rollout.sglang={page_size: 1}"]).rollout.sglang == {"page_size": 1}
    recipe = ["+recipe=quickstart", "evaluation.datasets={}"]
    assert load_config(recipe, files=False).evaluation.datasets == {}


def test_interpolation_reaches_other_keys(argv: list[str]) -> None:
    assert load_config([*argv, "run.name=a"]).run.dir == "runs/a"
    assert load_config([*argv, "run.name=a", "run.dir=/tmp/${run.name}_x"]).run.dir == "/tmp/a_x"


def test_user_recipes_are_found_by_config_dir(tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it's mine" / "recipe").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's mine" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\nrollout: {batch_size: 6, sglang: {page_size: 16}}\n"
    )
    cfg = load_config([*argv, "--config-dir", "it's mine", "+recipe=mine"])
    assert (cfg.rollout.batch_size, cfg.rollout.sglang) == (6, {"page_size": 16})


def test_sealed_after_load_and_after_pickling(argv: list[str]) -> None:
    for cfg in (load_config(argv), pickle.loads(pickle.dumps(load_config(argv)))):  # noqa: S301 - pickled on this line
        for group in (cfg, cfg.optim, cfg.algo, cfg.run):
            with pytest.raises(AttributeError, match="sealed"):
                group.name = "x"
        assert dataclasses.replace(cfg.optim, lr=3.0).lr == 3.0


def test_round_trip_of_every_algorithm(argv: list[str]) -> None:
    for extra in (SFT, ["algo=reinforce_pp", "algo.kl_coef=0.1"], ["rollout.sglang.page_size=1", "optim.lr=1e-6"]):
        cfg = load_config([*argv, *extra])
        assert from_yaml(to_yaml(cfg), files=True) == cfg
        assert isinstance(from_yaml(to_yaml(cfg)), TrainConfig)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algo: {name: grpo}\nrollout: {bach_size: 3}", ["rollout.bach_size", "'rollout.batch_size'"]),
        ("algo: {name: grop}", ["algo.name", "'grop'"]),
        ("algo: [", ["not valid YAML"]),
        ("algo: !!bool foo", ["not valid YAML: 'foo'"]),
        ("algo: !!int ''", ["not valid YAML: string index"]),
        ("algo: !!timestamp x", ["not valid YAML: 'NoneType'"]),
        ("3", ["algo.name"]),
    ],
)
def test_a_damaged_saved_configuration_is_named(text: str, words: list[str]) -> None:
    with refusal(words):
        from_yaml(text)


def test_show_prints_missing_keys_too() -> None:
    text = show(["rollout.batch_size=7"])
    assert "hf_checkpoint: ???" in text
    assert "batch_size: 7" in text


@pytest.mark.parametrize(
    "statement",
    [
        "from slime_like.config.load.loader import load_config; load_config(['+recipe=quickstart'], files=False)",
        "import train; assert train.main(['--help']) == 0",
        "import train; assert train.main(['+recipe=quickstart_async', '--plan']) == 0",
    ],
    ids=["load", "help", "plan"],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    code = f"import sys; {statement}; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60 * scale(), check=True
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_recipe_with_keys_of_another_algorithm_is_refused_with_the_algorithms_that_have_them() -> None:
    with refusal(
        ("algo.kl_loss_coef (in configs/recipe/quickstart.yaml) exists only under algo=grpo or ", "has algo=sft")
    ):
        load_config(["+recipe=quickstart", "algo=sft"])
