"""Fault injection: the reward server is unreachable for some time (``chaos.faults=[reward_down:...]``)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from slime_like.data.faults import REWARD_SERVER, Recovery
from slime_like.util.ports import PortLease

HOST = "127.0.0.1"


@dataclass(slots=True)
class Outage:
    """Redirects requests to a port without a listener while it lasts, so that they fail as with a server that is down."""

    seconds: float
    unscored: int = 0  # samples without a score because of it
    _noticed: float = 0.0  # unix seconds of the first request that failed; 0: none has
    _cause: str = ""
    _answered: float = 0.0  # unix seconds of the first answer after it
    _began: float = field(default_factory=time.monotonic)
    _dead_port: PortLease = field(default_factory=lambda: PortLease(HOST))

    @property
    def lasts(self) -> bool:
        """True while the server is unreachable."""
        return time.monotonic() - self._began < self.seconds

    def address(self, url: str) -> str:
        """Return the address to which a request for ``url`` is sent."""
        return (
            urlsplit(url)._replace(scheme="http", netloc=f"{HOST}:{self._dead_port.port}").geturl()
            if self.lasts
            else url
        )

    def refused(self, error: Exception) -> None:
        """Record a failed request."""
        if not self._noticed:
            self._noticed, self._cause = time.time(), f"down: {error}"

    def answered(self) -> None:
        """Record an answer of the server."""
        if not self.lasts and not self._answered:
            self._answered = time.time()

    def end(self) -> None:
        """Release the port."""
        self._dead_port.release()

    @property
    def over(self) -> bool:
        """True if its record is complete: it has ended, and no request failed or one was answered since."""
        return not self.lasts and bool(self._answered or not self._noticed)

    def recoveries(self) -> tuple[Recovery, ...]:
        """Return its record so far; empty while no request has failed."""
        if not self._noticed:
            return ()
        back = self._answered
        return (Recovery(REWARD_SERVER, self._cause, self._noticed, back, back, groups=self.unscored),)
