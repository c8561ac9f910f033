"""Damaged files of a run: refused with one message or read correctly. ``scripts/soak_files.py`` runs many more trials."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.damage.checks import FAULTS, RunFiles
from tests.damage.world import FILES

EXAMPLES = settings().max_examples * 3 // 10


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    return RunFiles(tmp_path_factory.mktemp("damaged"), trainer=False)


@given(kind=st.sampled_from(sorted(FILES)), seed=st.integers(0, 2**32))
@settings(
    max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_damaged_file_is_named_or_read(world: RunFiles, kind: str, seed: int) -> None:
    rng = Random(seed)
    trial = world.trial(kind, rng.choice(FILES[kind]), rng)
    assert trial.outcome not in FAULTS, trial
