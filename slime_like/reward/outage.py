"""A planted fault: the reward server cannot be reached for a while (``chaos.faults=[reward_down:...]``)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from slime_like.data.faults import REWARD_SERVER, Recovery
from slime_like.util.ports import PortLease

HOST = "127.0.0.1"


@dataclass(slots=True)
class Outage:
    """While it lasts requests go to a port on which nobody listens, and fail as they do where a server is down."""

    seconds: float
    unscored: int = 0  # samples that it cost their score
    _noticed: float = 0.0  # unix seconds of the first request that failed; 0: none has
    _cause: str = ""
    _answered: float = 0.0  # of the first answer after it
    _began: float = field(default_factory=time.monotonic)
    _nobody: PortLease = field(default_factory=lambda: PortLease(HOST))

    @property
    def lasts(self) -> bool:
        """Whether the server is out of reach."""
        return time.monotonic() - self._began < self.seconds

    def address(self, url: str) -> str:
        """Where a request for ``url`` goes."""
        return (
            urlsplit(url)._replace(scheme="http", netloc=f"{HOST}:{self._nobody.port}").geturl() if self.lasts else url
        )

    def refused(self, error: Exception) -> None:
        """A request has failed."""
        if not self._noticed:
            self._noticed, self._cause = time.time(), f"down: {error}"

    def answered(self) -> None:
        """The server has answered a request."""
        if not self.lasts and not self._answered:
            self._answered = time.time()

    def end(self) -> None:
        """Let others have the port."""
        self._nobody.release()

    @property
    def over(self) -> bool:
        """Whether all that can be told of it is known: no request failed, or one has been answered since."""
        return not self.lasts and bool(self._answered or not self._noticed)

    def told(self) -> tuple[Recovery, ...]:
        """What became of it so far; nothing while no request has failed."""
        if not self._noticed:
            return ()
        back = self._answered
        return (Recovery(REWARD_SERVER, self._cause, self._noticed, back, back, groups=self.unscored),)
