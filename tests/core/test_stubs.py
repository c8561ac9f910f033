"""``typings/`` declares only what the installed packages have."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

TYPINGS = Path(__file__).parents[2] / "typings"
STUBS = sorted(TYPINGS.rglob("*.pyi"))


def declared_names(stub: Path) -> list[str]:
    """Return the public names of a stub, with methods as ``Class.method``, without annotated attributes of classes."""
    names: list[str] = []
    for node in ast.parse(stub.read_text()).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case ast.FunctionDef(name=name) if not name.startswith("_"):
                names.append(name)
            case ast.ClassDef(name=name) if not name.startswith("_"):
                methods = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
                names += [name, *(f"{name}.{method}" for method in methods if not method.startswith("__"))]
            case _:
                pass
    return names


@pytest.mark.slow
@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.relative_to(TYPINGS)))
def test_declared_names_exist(stub: Path) -> None:
    module = importlib.import_module(".".join(stub.relative_to(TYPINGS).parent.parts))
    names = declared_names(stub)
    assert names
    missing = [name for name in names if not _has(module, name)]
    assert missing == []


def _has(value: object, dotted: str) -> bool:
    """Return True if ``value`` has the attribute ``a.b``."""
    for name in dotted.split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True
