"""Damaged files of a run: refused with one message or read correctly. ``scripts/soak_files.py`` runs many more trials."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage.checks import FAULTS, RunFiles
from tests.damage.world import FILES
from tests.hypothesis_examples import num_examples

EXAMPLES = num_examples(30)


@pytest.fixture(scope="module")
def world() -> Iterator[RunFiles]:
    """Yield files in a folder that other users can enter.

    As root, the test reads unreadable files as user nobody, who cannot enter pytest's folder.
    """
    with tempfile.TemporaryDirectory(prefix="damaged") as folder:
        Path(folder).chmod(0o755)
        yield RunFiles(Path(folder), trainer=False)


@pytest.mark.slow
@given(kind=st.sampled_from(sorted(FILES)), seed=st.integers(0, 2**32))
@settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_file_is_named_or_read(world: RunFiles, kind: str, seed: int) -> None:
    rng = Random(seed)
    trial = world.trial(kind, rng.choice(FILES[kind]), rng)
    assert trial.outcome not in FAULTS, trial
