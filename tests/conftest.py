"""Distribution of tests over processes of pytest-xdist, and a hypothesis profile without a deadline per example."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from slime_like.util.imports import Distributions, heavy_imports
from slime_like.util.scheduling import use_batch_scheduling
from tests import pickled_copies
from tests.groups import LONGEST

settings.register_profile("slime_like", deadline=None)
settings.register_profile("short", deadline=None, max_examples=25)  # of scripts/check.sh
settings.load_profile("slime_like")

# Tests import transformers too: without this it reads the file list of every package for 2.5 s (slime_like/util/imports.py).
read_distributions = importlib.metadata.packages_distributions
importlib.metadata.packages_distributions = functools.partial(Distributions, read_distributions)

MARKS_OF_FILE = re.compile(r"^pytestmark = (\[\n(    .*\n)*\]|.*)", re.MULTILINE)
IMPORTS_MEGATRON = (
    "imports megatron-core, whose groups and threads tests of this process would share, and skips its adaptations: run it on a rank "
    "(tests/train/jobs.py), or import megatron-core within the test's own process"
)
megatron_reported: list[bool] = []


def excluded_marks(expression: str) -> set[str]:
    """Return the marks that ``-m EXPRESSION`` excludes.

    The result is empty if the expression contains anything other than marks, ``not`` and ``and``.
    """
    terms = expression.split(" and ")
    if not all(re.fullmatch(r"(not )?\w+", term) for term in terms):
        return set()
    return {term.removeprefix("not ") for term in terms if term.startswith("not ")}


def is_excluded(text: str, expression: str) -> bool:
    """Return whether ``-m EXPRESSION`` deselects every test of the file ``text`` by a mark of the entire file."""
    marks = MARKS_OF_FILE.search(text)
    return marks is not None and not excluded_marks(expression).isdisjoint(re.findall(r"mark\.(\w+)", marks[0]))


def pytest_configure(config: pytest.Config) -> None:
    """Set the scheduling policy and the signals that child processes inherit, and how a process of xdist ends.

    Such a process has sent its results when it exits, and xdist ignores its exit code. Python would free a million objects for
    3 s of CPU time. Functions that the tests and their imports register for the exit run before ``os._exit``, which is registered
    first.
    """
    use_batch_scheduling()  # tests have more processes than cores, and many exchange messages
    restore_signals()
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def restore_signals() -> None:
    """Restore signals that children would inherit as ignored: a shell's background jobs ignore SIGINT, ``nohup`` ignores SIGHUP."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose marks deselect all its tests: imports of tests with engines and ranks take seconds."""
    if collection_path.suffix == ".py" and is_excluded(collection_path.read_text(), config.option.markexpr):
        return True
    return None


@pytest.hookimpl(optionalhook=True)  # not known without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Return a scheduler that runs the tests of a group in one process.

    ``--dist loadgroup`` with the mark ``xdist_group`` does the same once xdist supports pytest 9.2.
    """
    from tests.groups import GroupScheduling

    return GroupScheduling(config, log, starts_engines="engine" not in excluded_marks(config.option.markexpr))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under xdist, begin with the files that take longest."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((i for i, f in enumerate(LONGEST) if item.nodeid.startswith(f)), len(LONGEST)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection during imports; later collect less often, and never the objects of imported modules.

    Garbage collection would take a fifth of the time of the imports and a tenth of that of the tests.
    """
    with heavy_imports():
        result = yield
    if "megatron.core" in sys.modules:
        raise pytest.UsageError(f"a test file {IMPORTS_MEGATRON}")
    pickled_copies.install()
    gc.set_threshold(20_000, 20, 20)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Restore the environment after each test: code under test changes that of its process, which later tests would inherit.

    Variables that a fixture of a module or session sets are removed too: such a fixture sets them for each start of a process.
    """
    before = dict(os.environ)
    try:
        return (yield)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@pytest.hookimpl(trylast=True)  # after the test's own teardown
def pytest_runtest_teardown() -> None:
    """Fail the first test that imports megatron-core in this process."""
    if "megatron.core" in sys.modules and not megatron_reported:
        megatron_reported.append(True)
        pytest.fail(f"this test {IMPORTS_MEGATRON}", pytrace=False)
