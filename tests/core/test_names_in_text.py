"""Every module and file of this repository that a page, comment or docstring names exists."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "slime_like",
    "slime_like_compat",
    "plugins",
    "benchmarks",
    "configs",
    "docs",
    "examples",
    "scripts",
    "tests",
)
OUR_PACKAGES = "(?:slime_like|slime_like_compat|slime_like_plugins)"
MODULE = re.compile(rf"(?<![\w./-])({OUR_PACKAGES}(?:\.\w+)+)")
FILE = re.compile(
    rf"(?<![\w./$-])((?:{OUR_PACKAGES}|plugins/slime_like_plugins|benchmarks|docs|scripts)/[\w./-]*\w\.(?:py|md|c|h|sh))\b"
)
ELSEWHERE = re.compile(
    r"slime_like\.test$|slime_like\.distributed\.wrapper\._hot|scripts/run-qwen|docs/measurements/gdn_gpu\.md"
)
"""Names in shared memory and of a compiled module, a script of slime, a page that a command will write."""

RELATIVE = re.compile(r"(?<!`)(`{1,2})([a-z]\w*(?:\.\w+)+)(?:\([^`]*\))?\1(?!`)")
"""A dotted name in backticks, with or without arguments; it is ours if it begins with a package or module of ours."""
DATA_FILE = re.compile(r"\.(?:csv|json|jsonl|yaml|html|npz|log|md|parquet|py|safetensors|so|txt)$")
OF_VALUES = {
    *("actor.inject_fault.remote", "config.backend", "engine.generate", "inputs.qkv", "run.assemble", "spec.sglang"),
    *("spec.start_deadline_s", "spec.wrap", "train.main", "view.sequences"),
}
"""Attributes of variables that have the name of a package or module."""
UPSTREAM = ("megatron", "verl")  # upstream packages that have the name of a folder of ours
PAGES_ABOUT_VERL = ("docs/coming_from_verl.md", "docs/defaults_verl.md")


def texts() -> Iterator[Path]:
    """Yield the files whose text is checked."""
    yield from (*ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".yaml", ".c", ".h", ".tsv"):
                yield path


def module_exists(name: str) -> bool:
    """Return True for a package, a module, and a name that a module or package mentions."""
    path = ROOT / ("plugins" if name.startswith("slime_like_plugins") else "")
    parts = name.split(".")
    for i, part in enumerate(parts):
        if (path / part / "__init__.py").is_file() or (path / part / "csrc").is_dir():
            path /= part
            continue
        module = path / f"{part}.py"
        if module.is_file():
            return i + 1 == len(parts) or mentions(module, parts[i + 1])
        return i > 0 and mentions(path / "__init__.py", part)
    return True


def mentions(module: Path, name: str) -> bool:
    return re.search(rf"\b{name}\b", module.read_text()) is not None


@cache
def places() -> dict[str, list[Path]]:
    """Return the folder or file of each of our packages and modules by its own name, without those of its parents."""
    paths: dict[str, list[Path]] = defaultdict(list)
    for root in ("slime_like", "slime_like_compat", "plugins/slime_like_plugins", "benchmarks", "examples"):
        for path in (ROOT / root).rglob("*"):
            if (path / "__init__.py").is_file():
                paths[path.name].append(path)
            elif path.suffix == ".py":
                paths[path.stem].append(path)
    return paths


@cache
def config_keys() -> tuple[str, ...]:
    return tuple((ROOT / "tests" / "config" / "keys.txt").read_text().split())


def is_config_key(name: str) -> bool:
    """Return True for a key, a group of keys, and a key within a free mapping."""
    return any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for key in config_keys())


def exists_in(path: Path, names: list[str]) -> bool:
    """Return True if ``path``, a package or module, has the modules ``names`` or mentions the first that is none."""
    for name in names:
        if (path / name / "__init__.py").is_file():
            path /= name
        elif (path / f"{name}.py").is_file():
            path /= f"{name}.py"
        else:
            return mentions(path / "__init__.py" if path.is_dir() else path, name)
    return True


def missing_relative_names(text: str) -> list[str]:
    """Return the dotted names of ``text`` that begin with a package or module of ours and do not exist."""
    missing: list[str] = []
    for _, name in RELATIVE.findall(text):
        first, *attributes = name.split(".")
        is_ours = first in places() and first not in UPSTREAM and name not in OF_VALUES
        if is_ours and not DATA_FILE.search(name) and not is_config_key(name):
            missing += [] if any(exists_in(path, attributes) for path in places()[first]) else [name]
    return missing


def missing_names(text: str) -> list[str]:
    """Return the modules and files that ``text`` names and that do not exist."""
    modules = (name for name in MODULE.findall(text) if not module_exists(name))
    files = (
        name for name in FILE.findall(text) if not (ROOT / name).exists() and not (ROOT / "plugins" / name).exists()
    )
    return [name for name in (*modules, *files) if not ELSEWHERE.match(name)]


def test_names_in_text_exist() -> None:
    missing_by_file = {
        str(path.relative_to(ROOT)): names for path in texts() if (names := missing_names(path.read_text()))
    }
    assert not missing_by_file, f"modules or files that do not exist: {missing_by_file}"


def test_relative_names_in_text_exist() -> None:
    missing_by_file = {
        name: names
        for path in texts()
        if (name := str(path.relative_to(ROOT))) not in PAGES_ABOUT_VERL
        and (names := missing_relative_names(path.read_text()))
    }
    assert not missing_by_file, f"modules or attributes that do not exist: {missing_by_file}"


@pytest.mark.parametrize("name", ["planner." + "moved", "collect.sampler." + "moved", "deadline." + "Moved"])
def test_a_relative_name_that_is_gone_is_detected(name: str) -> None:
    assert missing_relative_names(f"see ``{name}`` and `{name}(x)`") == [name, name]


@pytest.mark.parametrize(
    "name", ["planner.engine", "rollout.collect", "rollout.tp", "deadline.Deadline", "report.html"]
)
def test_a_relative_name_that_exists_passes(name: str) -> None:
    assert missing_relative_names(f"see `{name}`") == []


@pytest.mark.parametrize(
    "name", ["slime_like." + "moved.away", "slime_like/" + "moved.py", "slime_like.loop." + "train_all"]
)
def test_a_name_that_is_gone_is_found(name: str) -> None:
    assert missing_names(f"see ``{name}``") == [name]
