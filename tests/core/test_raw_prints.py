"""Terminal output: every write to a standard stream is constant text or goes through ``printable``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
STREAMS = {"sys.stdout.write", "sys.stderr.write", "sys.__stdout__.write", "sys.__stderr__.write", "out.write", "print"}
TRACEBACKS = {"traceback.print_exc", "traceback.print_exception", "traceback.print_stack", "warnings.warn"}
ATTRIBUTES = {name.rpartition(".")[2] for name in STREAMS | TRACEBACKS}
SAFE = {"visible", "complaint"}


def raw_prints(source: str) -> Iterator[int]:
    """Yield lines that write text of unknown origin without escaping it."""
    if not re.search(rf"\b({'|'.join(ATTRIBUTES)})\b", source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and last_name(node.func) in ATTRIBUTES:
            name = ast.unparse(node.func)
            if name in TRACEBACKS or (name in STREAMS and not all(is_safe(argument) for argument in node.args)):
                yield node.lineno


def last_name(function: ast.expr) -> str:
    """Return the attribute or name that is called; empty for another expression."""
    match function:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case _:
            return ""


def is_safe(argument: ast.expr) -> bool:
    """Return True for constants and results of ``printable``."""
    if isinstance(argument, ast.Call):
        return ast.unparse(argument.func) in SAFE
    return isinstance(argument, ast.Constant)


def test_no_file_prints_unescaped_text() -> None:
    folders = [REPOSITORY / name for name in ("scripts", "benchmarks", "examples", "slime_like", "plugins")]
    files = [REPOSITORY / "train.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]
    assert len(files) > 200
    places = [f"{path.relative_to(REPOSITORY)}:{line}" for path in files for line in raw_prints(path.read_text())]
    assert places == [], "route these through slime_like.printable"


@pytest.mark.parametrize(
    "line",
    [
        "print(name)",
        "print(f'{name}')",
        "print('a', name)",
        "sys.stderr.write(text + '\\n')",
        "sys.stdout.write(str(visible(x)))",
        "traceback.print_exc()",
        "out.write(text)",
    ],
)
def test_raw_prints_are_found(line: str) -> None:
    assert list(raw_prints(f"pass\n{line}\n")) == [2]


@pytest.mark.parametrize("line", ["print()", "print('done', file=sys.stderr)", "sys.stderr.write(complaint(error))"])
def test_safe_prints_are_accepted(line: str) -> None:
    assert list(raw_prints(line)) == []
