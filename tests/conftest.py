"""Distribution of tests over processes of pytest-xdist, and a hypothesis profile without a deadline per example."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("slime_like", deadline=None)
settings.load_profile("slime_like")

# Files that share a fixture of the session: the engine of tests/engine/conftest.py, the ranks of tests/train/conftest.py.
ENGINE = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        "agent",
        "cpu_decode",
        "generate",
        "kv_capacity",
        "manager",
        "memory",
        "partial",
        "same_rollouts",
        "seeds",
        "tools",
        "weights",
    )
)
RANKS = ("tests/train/",)
# Files that take minutes, longest first: a long one that starts last would leave the other processes idle.
LONGEST = (
    *(*ENGINE, *RANKS),
    *(f"tests/e2e/test_{name}.py" for name in ("hybrid", "same_run", "split", "colocated", "library", "roles")),
    *("tests/e2e/", "tests/engine/", "tests/distributed/", "tests/config/", "tests/convert/"),
)


def group_of(nodeid: str) -> str:
    """Return the group of a test: its file, or one name for all files that share a fixture of the session."""
    file = nodeid.partition("::")[0]
    return next((shared[0] for shared in (ENGINE, RANKS) if file.startswith(shared)), file)


@pytest.hookimpl(optionalhook=True)  # not known without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler that runs the tests of a group in one process.

    ``--dist loadgroup`` with the mark ``xdist_group`` does the same once xdist supports pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under xdist, begin with the files that take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((i for i, f in enumerate(LONGEST) if item.nodeid.startswith(f)), len(LONGEST)))
