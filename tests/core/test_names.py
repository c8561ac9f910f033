"""Names of the source tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("slime_like", "slime_like_compat", "plugins", "scripts", "benchmarks", "examples", "tests")


def defined_classes(folders: list[Path]) -> dict[str, list[str]]:
    """Return the places where each class name is defined."""
    places: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in folder.rglob("*.py"):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(folder.parent)}:{node.lineno}")
    return places


def repeated_classes(places_by_class: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the class names that are defined more than once."""
    return {name: places for name, places in places_by_class.items() if len(places) > 1}


def test_a_class_name_means_one_thing_in_the_whole_tree() -> None:
    classes = defined_classes([REPOSITORY / name for name in PACKAGES])
    assert len(classes) > 300
    assert repeated_classes(classes) == {}


def test_a_repeated_class_name_is_detected(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("class Twice: ...\n")
    classes = defined_classes([tmp_path / "one", tmp_path / "two"])
    assert repeated_classes(classes) == {"Twice": ["one/module.py:1", "two/module.py:1"]}
