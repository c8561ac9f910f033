"""Entry of the metric dictionary."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_like.metrics.remedies import REMEDIES


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """Description of a metric, or of all metrics whose names match ``name``; ``healthy`` is the expected range.

    A part ``<x>`` of ``name`` matches one or more characters other than ``/``.
    """

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""

    @property
    def remedy(self) -> str:
        """Return the advice for a value outside ``healthy``, "" if there is no such range."""
        return REMEDIES.get(self.name, "")

    def matches(self, name: str) -> bool:
        """Return whether this entry describes the metric ``name``."""
        return re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.sub(r"([.+*?|()])", r"\\\1", self.name)), name) is not None
