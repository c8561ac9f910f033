"""The test scheduler completes a session in which a process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from slime_like.util.deadline import scale
from tests.groups import GroupScheduling

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.groups import GroupScheduling
    return GroupScheduling(config, log, starts_engines=True)
"""


@pytest.mark.slow
def test_tests_after_a_crash_run_and_completed_groups_do_not_return(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in "abde":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): ...\ndef test_two(): ...\n")
    (tmp_path / "test_c.py").write_text("import os\ndef test_dies(): os._exit(9)\ndef test_after(): ...\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadscope", "-p", "no:cacheprovider", "-v", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600 * scale(),
        check=False,
    )
    assert "crashed while running 'test_c.py::test_dies'" in result.stdout, result.stdout
    assert "1 failed, 9 passed" in result.stdout, result.stdout


class DeadNode:
    """Fake process of xdist that has died, but that xdist still lists."""

    def send_runtest_some(self, indices: list[int]) -> None:
        raise OSError("cannot send (already closed?)")


def test_a_group_for_a_process_that_has_just_died_runs_in_another() -> None:
    node: Any = DeadNode()
    scheduling = GroupScheduling.__new__(GroupScheduling)  # without the options of a session
    scheduling.starts_engines = True
    scheduling.workqueue = OrderedDict({"test_b.py": {"test_b.py::test_one": False}})
    scheduling.assigned_work = {node: {"test_a.py": {"test_a.py::test_dies": False}}}
    scheduling.registered_collections = {node: ["test_a.py::test_dies", "test_b.py::test_one"]}
    scheduling._assign_work_unit(node)
    assert scheduling.remove_node(node) == "test_a.py::test_dies"
    assert scheduling.workqueue == {"test_b.py": {"test_b.py::test_one": False}}


class ListeningNode:
    """Fake process of xdist that records the tests that it receives."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.indices += indices


@pytest.mark.parametrize(("num_nodes", "expected"), [(3, [[0], [1], [3, 2]]), (1, [[0, 1]])])
def test_the_last_of_several_processes_begins_with_the_last_groups(num_nodes: int, expected: list[list[int]]) -> None:
    """The queue begins with groups that start engines and ranks, of which few should run at the same time."""
    nodes: list[Any] = [ListeningNode() for _ in range(num_nodes)]
    tests = [f"test_{name}.py::test_one" for name in "abcd"]
    scheduling = GroupScheduling.__new__(GroupScheduling)
    scheduling.starts_engines = True
    scheduling.workqueue = OrderedDict((test.partition("::")[0], {test: False}) for test in tests)
    scheduling.assigned_work = {node: {} for node in nodes}
    scheduling.registered_collections = dict.fromkeys(nodes, tests)
    for node in (*nodes, nodes[-1]):
        scheduling._assign_work_unit(node)
    assert [node.indices for node in nodes] == expected
