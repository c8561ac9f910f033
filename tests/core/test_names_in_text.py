"""Every module and file of this repository that a page, comment or docstring names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def texts() -> Iterator[Path]:
    """Yield the files that name others."""
    yield from (*ROOT.glob("*.md"), *ROOT.glob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.yml"))
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".yaml", ".c", ".h", ".tsv"):
                yield path


def module_exists(name: str) -> bool:
    """True for a package, a module, and a name that a module or package mentions."""
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


@pytest.mark.parametrize(
    "name", ["slime_like." + "moved.away", "slime_like/" + "moved.py", "slime_like.loop." + "train_all"]
)
def test_a_name_that_is_gone_is_found(name: str) -> None:
    assert missing_names(f"see ``{name}``") == [name]
