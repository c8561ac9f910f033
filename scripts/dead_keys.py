"""List configuration keys that no code outside ``slime_like/config`` reads as an attribute.

python scripts/dead_keys.py [folder of the package]      prints one key per line; exit code 1 if there are any
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Collection, Iterator
from dataclasses import fields
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from slime_like.config.schema.base import Config  # noqa: E402
from slime_like.config.schema.known import ALGORITHMS, known_keys  # noqa: E402
from slime_like.config.schema.root import TrainConfig  # noqa: E402
from slime_like.printable import visible  # noqa: E402

PACKAGE = REPOSITORY / "slime_like"


def groups(config: type[Config], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield name, class name and dotted path of every group below ``config``."""
    for item in fields(config):
        factory = item.default_factory
        if isinstance(factory, type) and issubclass(factory, Config):
            yield item.name, factory.__name__, f"{prefix}{item.name}"
            yield from groups(factory, f"{prefix}{item.name}.")


GROUPS = {"algo": "algo", **{name: path for name, _, path in groups(TrainConfig)}}
CLASSES = {
    "AlgoConfig": "algo",
    "PolicyConfig": "algo",
    "PolicyGradientConfig": "algo",
    **{schema.__name__: "algo" for schema in ALGORITHMS.values()},
    **{kind: path for _, kind, path in groups(TrainConfig)},
}


def last_name(node: ast.expr) -> str:
    """Return the last name of an expression (``cfg.rollout``: rollout, ``self._config``: config); empty if it has none."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name.lstrip("_")
        case _:
            return ""


def aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Return a dict from each name in a file to the config groups that it may stand for.

    A name stands for the group of the same name and for groups whose class its annotation names. After ``x = y``, x also
    stands for the groups of y.
    """
    paths: dict[str, set[str]] = {name: {path} for name, path in GROUPS.items()}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name, annotation=ast.expr() as annotation):
                paths.setdefault(name.lstrip("_"), set()).update(annotated_groups(annotation))
            case ast.AnnAssign(target=target, annotation=annotation):
                paths.setdefault(last_name(target), set()).update(annotated_groups(annotation))
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[target], value=value):
                names, values = unpack(target), unpack(value)
                for name, item in zip(names, values, strict=True) if len(names) == len(values) else ():
                    paths.setdefault(last_name(name), set()).update(paths.get(last_name(item), set()))
            case _:
                pass
    return paths


def unpack(node: ast.expr) -> list[ast.expr]:
    """Return the elements of a tuple, or the expression alone."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def annotated_groups(annotation: ast.expr) -> Iterator[str]:
    """Yield the groups whose class an annotation names."""
    for node in ast.walk(annotation):
        if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in CLASSES:
            yield CLASSES[last_name(node)]


@functools.cache
def keys_read(source: str) -> frozenset[str]:
    """Return the dotted keys that a file reads, as ``<group>.<key>`` or through a name bound to the group."""
    tree = ast.parse(source)
    alias_names = aliases(tree)
    read_keys: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            read_keys |= {f"{group}.{node.attr}" for group in alias_names.get(last_name(node.value), set())}
    return frozenset(read_keys)


def dead_keys(package: Path, keys: Collection[str]) -> list[str]:
    """Return the ``keys`` that no file of ``package`` outside its ``config`` reads."""
    keys_of_files: set[str] = set()
    for path in package.rglob("*.py"):
        if "config" not in path.relative_to(package).parts:
            keys_of_files |= keys_read(path.read_text())
    return sorted(set(keys) - keys_of_files)


def main(argv: list[str]) -> int:
    """Print the dead keys. Return exit code 1 if there are any, else 0."""
    package = Path(argv[0]) if argv else PACKAGE
    keys = known_keys()
    dead = dead_keys(package, keys)
    for key in dead:
        sys.stdout.write(visible(f"{key}: no code in {package} reads it; remove the key, or use it\n"))
    if not dead:
        sys.stdout.write(visible(f"all {len(keys)} keys are read\n"))
    return int(bool(dead))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
