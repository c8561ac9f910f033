"""Selection and grouping of tests in ``tests/conftest.py`` and ``tests/groups.py``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import excluded_marks, is_excluded
from tests.groups import GROUPS, HEAVY_IMPORTS, WAITING, group_of

UNIT = "not engine and not ranks and not slow"


@pytest.mark.parametrize(
    ("marks", "expression", "excluded"),
    [
        ("pytestmark = pytest.mark.engine", UNIT, True),
        ("pytestmark = [pytest.mark.upstream, pytest.mark.slow]", UNIT, True),
        ("pytestmark = [\n    pytest.mark.upstream,\n    pytest.mark.ranks,\n]", UNIT, True),
        ("pytestmark = [\n    pytest.mark.upstream,\n]\nX = [pytest.mark.slow]", UNIT, False),
        ("pytestmark = pytest.mark.upstream", UNIT, False),
        ("pytestmark = pytest.mark.engine", "engine and not e2e", False),
        ("pytestmark = pytest.mark.engine", "not (engine and e2e)", False),
        ("pytestmark = pytest.mark.engine", "gpu or not engine", False),
        ("pytestmark = pytest.mark.engine", "", False),
        ("@pytest.mark.engine\ndef test_one(): ...", UNIT, False),
    ],
)
def test_a_file_is_left_out_if_its_mark_excludes_every_test(marks: str, expression: str, excluded: bool) -> None:
    assert is_excluded(f"import pytest\n\n{marks}\n", expression) == excluded


def test_files_that_share_an_engine_ranks_or_an_import_are_one_group() -> None:
    assert excluded_marks(UNIT) == {"engine", "ranks", "slow"}
    for files, starts_engines in (*((files, True) for files in GROUPS), (HEAVY_IMPORTS, False), (WAITING, False)):
        assert all((Path(__file__).parents[2] / file).exists() for file in files)
        assert {group_of(f"{file}::test", starts_engines=starts_engines) for file in files} == {files[0]}
    assert group_of("tests/engine/test_tensor_parallel.py::test") == "tests/engine/test_tensor_parallel.py"


def test_files_that_share_a_fork_server_are_in_a_group() -> None:
    """A file outside of the groups would start a fork server of its own."""
    root = Path(__file__).parents[2]
    for path in [path for folder in ("engine", "e2e", "phantom") for path in root.glob(f"tests/{folder}/test_*.py")]:
        file = str(path.relative_to(root))
        if re.search(r"forked_engines|fault_injection|worker_server|trainer_forks", path.read_text()):
            assert any(file in files for files in GROUPS), f"{file}: add it to a group of tests/groups.py"
