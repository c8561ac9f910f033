"""Choice between large and small requests to a worker by their measured rows per second."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)
STREAM_ROWS = 32  # maximum rows of a request in stream mode
SMOOTHING = 0.25  # weight of a new measurement
PROBE_LENGTH = 2  # consecutive measurements of the other mode; the very first one is a warm-up and is not counted
PROBE_INTERVAL = 128  # measurements between probes
FASTER = 1.05  # a mode has to be this much faster to replace the other
BEHIND = 2  # consecutive measurements in which the engine waited longer than it computed, before a probe


@dataclass(slots=True)
class ModeChooser:
    """Choice of the row limit per request: the option ``capacity`` (``batched``), or at most ``STREAM_ROWS`` (``stream``).

    ``auto`` begins with ``batched``. While the mode is ``stream``, or the engine waits for the worker longer than it computes,
    the other mode is measured at intervals; it replaces the current one if it has over ``FASTER`` times the rows per second.
    Batches of up to ``STREAM_ROWS`` rows are sent in the same way in both modes, and are not measured.
    """

    setting: str = "auto"
    mode: str = "batched"
    rates: dict[str, float] = field(default_factory=dict)  # rows/s
    changes: int = 0
    _has_decided: bool = False
    _behind: int = 0
    _probe: int = 0  # measurements of the other mode that remain
    _since_probe: int = PROBE_INTERVAL

    def __post_init__(self) -> None:
        if self.setting != "auto":
            self.mode = self.setting

    @property
    def next_mode(self) -> str:
        """Mode of the next batch."""
        return other_mode_of(self.mode) if self._probe else self.mode

    def record(self, num_rows: int, seconds: float, wait_s: float) -> None:
        """Record a measurement of ``next_mode``: ``num_rows`` remote rows took ``seconds``, including ``wait_s`` of waiting.

        With ``auto`` and over ``STREAM_ROWS`` rows, this may change the mode; otherwise it does nothing.
        """
        if self.setting != "auto" or num_rows <= STREAM_ROWS:
            return
        measured_mode, rate = self.next_mode, num_rows / max(seconds, 1e-9)
        if not (self._probe == PROBE_LENGTH and measured_mode not in self.rates):
            self.rates[measured_mode] = rate + (1 - SMOOTHING) * (self.rates.get(measured_mode, rate) - rate)
        self._since_probe += 1
        if self._probe:
            self._probe -= 1
            if not self._probe:
                self._choose()
            return
        self._behind = self._behind + 1 if wait_s > seconds - wait_s else 0
        if self._since_probe >= PROBE_INTERVAL and (self._behind >= BEHIND or self.mode == "stream"):
            self._probe, self._since_probe = PROBE_LENGTH, 0

    def _choose(self) -> None:
        other_mode = other_mode_of(self.mode)
        changes = self.rates[other_mode] > FASTER * self.rates[self.mode]
        if not changes and not self._has_decided:
            logger.info(
                "slime_like remote experts keep %s mode: %.0f rows/s, %s mode %.0f rows/s",
                *(self.mode, self.rates[self.mode], other_mode, self.rates[other_mode]),
            )
        self._has_decided = True
        if changes:
            logger.info(
                "slime_like remote experts change from %s to %s mode: %.0f instead of %.0f rows/s",
                *(self.mode, other_mode, self.rates[other_mode], self.rates[self.mode]),
            )
            self.mode, self.changes = other_mode, self.changes + 1


def other_mode_of(mode: str) -> str:
    return "stream" if mode == "batched" else "batched"
