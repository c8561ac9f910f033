"""A configuration key that nothing reads is a defect: each one is an attribute that code outside ``config`` looks up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from slime_like.config.known import ALGORITHMS, known_keys
from slime_like.config.root import TrainConfig

PACKAGE = Path(__file__).parents[2] / "slime_like"
GROUPS = {item.name for item in fields(TrainConfig)}
CLASSES = {
    "PolicyConfig": "algo",
    "PolicyGradientConfig": "algo",
    **{schema.__name__: "algo" for schema in ALGORITHMS.values()},
    **{str(item.type): item.name for item in fields(TrainConfig)},
}


def last_name(node: ast.expr) -> str:
    """``cfg.rollout`` -> ``rollout``, ``self._config`` -> ``config``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.lstrip("_")
        case _:
            return ""


def aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Names that hold a group in this file: annotated with its class, or assigned from one that does."""
    found: dict[str, set[str]] = {group: {group} for group in GROUPS}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                found.setdefault(name.lstrip("_"), set()).update(annotated(annotation))
            case ast.AnnAssign(target=target, annotation=annotation):
                found.setdefault(last_name(target), set()).update(annotated(annotation))
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value):
                names, values = unpack(target), unpack(value)
                for name, item in zip(names, values, strict=True) if len(names) == len(values) else ():
                    found.setdefault(last_name(name), set()).update(found.get(last_name(item), set()))
            case _:
                pass
    return found


def unpack(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def annotated(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in CLASSES:
            yield CLASSES[last_name(node)]


def keys_read(source: str) -> set[str]:
    """Dotted keys that one file reads, as ``<group>.<key>`` or through a name that holds the group."""
    tree = ast.parse(source)
    named = aliases(tree)
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {f"{group}.{node.attr}" for group in named.get(last_name(node.value), set())}
    return found


def test_the_search_sees_reads_and_only_reads() -> None:
    source = """
def f(cfg: TrainConfig, how: OptimConfig):
    p, loop = cfg.parallel, cfg.loop
    self._loss = cfg.algo
    self._how, n = how, 3
    print(self._how.eps)
    return p.tp + how.lr + cfg.rollout.batch_size + other.seed + self._loss.eps_clip
"""
    read = keys_read(source)
    assert {"parallel.tp", "optim.lr", "optim.eps", "rollout.batch_size", "algo.eps_clip"} <= read
    assert "run.seed" not in read


def test_every_key_is_read_outside_config() -> None:
    read: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if "config" not in path.relative_to(PACKAGE).parts:
            read |= keys_read(path.read_text())
    assert sorted(set(known_keys()) - read) == []
