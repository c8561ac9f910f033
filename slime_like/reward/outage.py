"""Injected outage of the reward server (``chaos.faults=[reward_down:...]``)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from slime_like.data.faults import REWARD_SERVER, Recovery
from slime_like.util.ports import PortLease

HOST = "127.0.0.1"


@dataclass(slots=True)
class Outage:
    """Outage of ``seconds``: requests are sent to a port that has no listener, as if the server were down."""

    seconds: float
    num_unscored: int = 0  # samples that got no score during the outage
    _noticed_at: float = 0.0  # unix seconds of the first failed request; 0 if none has failed
    _cause: str = ""
    _answered_at: float = 0.0  # unix seconds of the first score or refusal after the outage; 0 if there is none
    _start_time: float = field(default_factory=time.monotonic)
    _dead_port: PortLease = field(default_factory=lambda: PortLease(HOST))

    @property
    def is_active(self) -> bool:
        """Return whether the server is unreachable now."""
        return time.monotonic() - self._start_time < self.seconds

    def address(self, url: str) -> str:
        """Return ``url`` redirected to the port without a listener, to which requests are sent during the outage."""
        return urlsplit(url)._replace(scheme="http", netloc=f"{HOST}:{self._dead_port.port}").geturl()

    def record_failure(self, error: Exception) -> None:
        """Record the failure of a request that was sent during the outage; only the first one counts."""
        if not self._noticed_at:
            self._noticed_at, self._cause = time.time(), f"down: {error}"

    def record_answer(self) -> None:
        """Record that the server scored or refused a sample; only the first response after the outage counts."""
        if not self.is_active and not self._answered_at:
            self._answered_at = time.time()

    def release(self) -> None:
        """Release the port."""
        self._dead_port.release()

    @property
    def is_over(self) -> bool:
        """Return whether the record is complete.

        It is complete if the outage is over and, if a request failed, the server has scored or refused a sample since.
        """
        return not self.is_active and bool(self._answered_at or not self._noticed_at)

    def recoveries(self) -> tuple[Recovery, ...]:
        """Return the record of this outage; empty while no request has failed."""
        if not self._noticed_at:
            return ()
        answered_at = self._answered_at
        return (
            Recovery(
                REWARD_SERVER,
                self._cause,
                self._noticed_at,
                up=answered_at,
                joined=answered_at,
                groups=self.num_unscored,
            ),
        )
