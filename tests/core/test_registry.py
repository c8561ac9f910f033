"""Names of parts and paths of user functions: resolved, or refused with the nearest known name."""

import ast
import importlib.util
from pathlib import Path

import pytest

from slime_like.config.schema import names
from slime_like.config.schema.family_entry import FamilyEntry
from slime_like.errors import ConfigError
from slime_like.registry import check, closest, metric_part, nearest, resolve

TABLE = {"grpo": "slime_like.algo.advantage:grpo"}


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"algo\.x='grpp' is unknown: did you mean 'grpo'\?"):
        check("algo.x", "grpp", TABLE)


def test_a_dotted_path_passes_only_where_allowed() -> None:
    check("reward.name", "mine.module:score", TABLE, dotted=True)
    with pytest.raises(ConfigError, match="is unknown"):
        check("reward.name", "mine.module:score", TABLE)


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        resolve("reward.name", "no_such_module:score", TABLE)


@pytest.mark.parametrize("line", ["sys.exit(2)", "argparse.ArgumentParser(prog='own').parse_args(['--size'])"])
def test_a_file_that_ends_the_process_while_it_is_imported_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own_script.py"
    file.write_text(f"import argparse, sys\n{line}\n")
    with pytest.raises(ConfigError, match=rf"algo\.loss='{file}:loss': .* raised SystemExit: 2 \({file}:2\)"):
        resolve("algo.loss", f"{file}:loss", names.LOSSES)


def test_a_missing_attribute_is_named() -> None:
    with pytest.raises(ConfigError, match="has no 'grpq'"):
        resolve("algo.x", "slime_like.algo.advantage:grpq", TABLE)


@pytest.mark.parametrize(
    ("name", "part"),
    [("/a/b.py:f", "b.py:f"), ("a.b:f", "a.b:f"), ("nonzero_std", "nonzero_std"), ("odd/name", "odd/name")],
)
def test_a_metric_names_a_file_without_its_folder(name: str, part: str) -> None:
    assert metric_part(name) == part


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_reward.py:", r"no name of a function after the colon: write my_reward\.py:FUNCTION$"),
        (":score", "no file or module before the colon"),
        (":", "no file or module before the colon"),
    ],
)
def test_a_path_without_a_module_or_a_function_is_refused(name: str, words: str) -> None:
    for refuse in (lambda: check("reward.name", name, TABLE, dotted=True), lambda: resolve("reward.name", name, TABLE)):
        with pytest.raises(ConfigError, match=rf"^reward\.name='{name}' has {words}"):
            refuse()


def test_a_missing_attribute_lists_only_what_the_module_defines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "pkg_of_own_names"
    package.mkdir()
    (package / "__init__.py").write_text("import re\nfrom json import dumps\nfrom .inner import score\nNUMBER = 3\n")
    (package / "inner.py").write_text("from json import dumps\ndef score(prompt, sample): ...\nclass Sink: ...\n")
    (tmp_path / "pkg_of_no_names.py").write_text("import re\nfrom json import dumps\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module, words in {
        "pkg_of_own_names": f"module 'pkg_of_own_names' ({package}/__init__.py) has no 'zzz'; known: score",
        "pkg_of_own_names.inner": "has no 'zzz'; known: Sink, score",
        "pkg_of_no_names": "has no 'zzz'; it defines no function or class: add zzz, or correct the path",
    }.items():
        with pytest.raises(ConfigError) as error:
            resolve("reward.name", f"{module}:zzz", {})
        assert str(error.value).endswith(words)


def test_a_distant_name_lists_the_known_names() -> None:
    assert nearest("zzz", ["alpha", "beta"]) == "known: alpha, beta"


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("temprature", "temperature"),
        ("n_samples", "n_samples_per_prompt"),
        ("max_response_length", "max_response_len"),
        ("--num-rollouts", "--num-rollout"),
        ("gpro", "grpo"),  # gspo has as many letters in common with it
        ("port", None),
        ("--fancy-flag", None),
        ("--print-config", None),
        ("max", None),
    ],
)
def test_only_a_similar_name_is_suggested(name: str, close: str | None) -> None:
    options = [
        "temperature",
        "n_samples_per_prompt",
        "max_response_len",
        "transport",
        "gspo",
        "grpo",
        "--num-rollout",
        "--balance-by-flops",
        "--sglang-config",
    ]
    assert closest(name, options) == close


def test_a_table_without_paths_names_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"\(your own: add it to FAMILIES in slime_like/config/schema/names.py, see docs"
    ):
        check("model.family", "mine", TABLE, table_name="FAMILIES")


def test_another_short_name_is_not_a_misspelling() -> None:
    assert nearest("gpu", ["auto", "cpu", "cuda"]) == "known: auto, cpu, cuda"


# These import megatron, which must stay out of this process, so the source is searched for the definition.
MEGATRON_TABLES = ("FAMILIES", "ATTENTIONS", "MIXERS", "FLOAT64_LAYERS", "CPU_KERNELS")
MEGATRON_ENTRIES = [(name, entry) for name in MEGATRON_TABLES for entry in getattr(names, name).items()]
TABLES = {
    name: table
    for name, table in vars(names).items()
    if name.isupper() and not name.startswith("_") and name not in MEGATRON_TABLES
}


@pytest.mark.parametrize(("table", "entry"), [(table, entry) for table, entries in TABLES.items() for entry in entries])
def test_every_name_resolves(table: str, entry: str) -> None:
    assert callable(resolve(table, entry, TABLES[table]))


def defines(path: str) -> bool:
    """Return whether the file of the module in ``path`` defines the function or class, without importing it."""
    module, _, attribute = path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"no module {module}"
    kinds = (ast.FunctionDef, ast.ClassDef)
    return any(
        isinstance(node, kinds) and node.name == attribute for node in ast.parse(Path(spec.origin).read_text()).body
    )


@pytest.mark.parametrize(("table", "item"), MEGATRON_ENTRIES)
def test_every_megatron_entry_is_defined(table: str, item: tuple[str, str | FamilyEntry]) -> None:
    name, entry = item
    path = entry.path if isinstance(entry, FamilyEntry) else entry
    assert defines(path), f"{table}[{name!r}]={path!r}"
    assert not defines(f"{path}_missing")


def test_a_missing_attribute_lists_no_private_names() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("reward.name", "tests.reward.rewards_of_users:zzz", {})
    assert "known: " in str(error.value) and " _" not in str(error.value)
