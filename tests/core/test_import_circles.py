"""Imports between modules of ``slime_like`` and ``slime_like_compat`` form no circle, also where only a type checker follows them.

The plugins are not covered: their packages import their own hooks when SGLang loads them.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest

PACKAGES = ("slime_like", "slime_like_compat")


def find_circle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle, empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) - {module} for module in graph.modules}
    assert len(imports) > 500
    assert find_circle(imports) == []


@pytest.mark.parametrize("imports", [{"a": {"b"}, "b": {"a"}}, {"a": {"b"}, "b": {"c"}, "c": {"d", "b"}}])
def test_a_circle_is_named(imports: dict[str, set[str]]) -> None:
    circle = find_circle(imports)
    assert circle[0] == circle[-1] and {"b"} < set(circle)
