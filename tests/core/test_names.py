"""Names of classes in the source tree: each is defined once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("slime_like", "slime_like_compat", "plugins", "scripts", "benchmarks", "examples", "tests")


# Matches every definition, and some lines of strings.
CLASS_LINE = re.compile(r"^[ \t\f]*class(?:[ \t\f]|\\\n)+(\w+)", re.MULTILINE)


def candidates(folders: list[Path]) -> dict[str, list[Path]]:
    """Return the files in which a line looks like the definition of a class, once per line, by the class name."""
    paths: dict[str, list[Path]] = defaultdict(list)
    for folder in folders:
        for path in folder.rglob("*.py"):
            for name in CLASS_LINE.findall(path.read_text()):
                paths[name].append(path)
    return paths


def repeated_classes(paths_by_class: dict[str, list[Path]], root: Path) -> dict[str, list[str]]:
    """Return the places of class names that are defined more than once; parse only files with a repeated candidate."""
    repeated = {name for name, paths in paths_by_class.items() if len(paths) > 1}
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted({path for name in repeated for path in paths_by_class[name]}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name in repeated:
                places[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return {name: lines for name, lines in places.items() if len(lines) > 1}


def test_a_class_name_means_one_thing_in_the_whole_tree() -> None:
    classes = candidates([REPOSITORY / name for name in PACKAGES])
    assert len(classes) > 300
    assert repeated_classes(classes, REPOSITORY) == {}


def test_a_repeated_class_name_is_detected(tmp_path: Path) -> None:
    for name, source in (
        ("one", "class \\\n  Twice: ...\nTEXT = '''\nclass Once: ...\n'''\n"),
        ("two", "if 1:\n    class Twice(object): ...\nclass Once: ...\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text(source)
    classes = candidates([tmp_path / "one", tmp_path / "two"])
    assert repeated_classes(classes, tmp_path) == {"Twice": ["one/module.py:1", "two/module.py:2"]}
