"""Findings of ``train.py --doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding. A ``MISSING`` finding makes the doctor exit with 1."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """One entry of the report; ``fix`` is empty if the level is OK."""

    level: Level
    subject: str
    text: str
    fix: str = ""
