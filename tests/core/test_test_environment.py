"""Each test starts with the same environment (``pytest_runtest_protocol`` of tests/conftest.py)."""

from __future__ import annotations

import os

import pytest

ADDED, REMOVED, CHANGED = "SLIME_LIKE_TEST_ENVIRONMENT", "PATH", "HOME"


@pytest.mark.parametrize("run", range(2))
def test_variables_that_a_test_adds_removes_and_changes_are_restored(run: int) -> None:
    """The second run reads the environment that the first has changed."""
    assert ADDED not in os.environ
    assert REMOVED in os.environ
    assert os.environ.get(CHANGED) != "/changed"
    os.environ[ADDED] = str(run)
    del os.environ[REMOVED]
    os.environ[CHANGED] = "/changed"
