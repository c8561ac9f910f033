"""What the soak of faults takes for a clean end of a part; the soak itself is not repeated."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

soak_faults: Any = importlib.import_module("scripts.soak_faults")
RANK, MANAGER = (
    "WorkerError: trainer rank 0 died in phase 'step'",
    "WorkerError: rollout manager died in phase 'collect'",
)


@pytest.mark.parametrize(
    ("end", "code", "early", "causes", "clean"),
    [
        ("terminate", 130, False, [], True),
        ("terminate", -15, False, [], False),
        ("terminate", -15, True, [], False),
        ("signals_at_start", 130, False, [], True),
        ("signals_at_start", -15, False, [], False),
        ("signals_at_start", -15, True, [], True),
        ("signals_at_start", 130, True, [RANK], False),
        ("kill_driver", -9, False, [], True),
        ("kill_rank", 1, False, [RANK], True),
        ("kill_rank", 1, False, [], False),
        ("kill_rank", 1, False, [RANK, RANK], False),
        ("stop_rank", 1, False, [MANAGER], False),
        ("kill_manager", 1, False, [MANAGER], True),
        ("kill_manager", 0, False, [MANAGER], False),
        ("", 0, False, [], True),
        ("", 0, False, [RANK], False),
    ],
)
def test_a_part_is_clean_with_its_code_and_its_crash_bundle(
    end: str, code: int, early: bool, causes: list[str], clean: bool
) -> None:
    part = soak_faults.Part(0, "one engine", end, code, 1.0, False, 0, 1, [], [], "", early, causes)
    assert part.clean == clean
