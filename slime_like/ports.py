"""Free ports for servers that bind a moment later."""

from __future__ import annotations

import random
import socket
from types import TracebackType

from slime_like.errors import SlimeLikeError

PORTS = range(15_000, 32_000)  # below Linux's ephemeral range, where any outgoing connection could take one meanwhile


class PortLease:
    """A TCP port nobody listens on, kept from other processes of this project on this machine until released.

    Between choosing a port and the server's bind, seconds later, another process could choose it too. An abstract unix
    socket named after the port is held meanwhile; the kernel drops it with the process. Raises ``SlimeLikeError`` when
    there is no port.
    """

    def __init__(self, host: str) -> None:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            self._holder = socket.socket(socket.AF_UNIX)
            try:
                self._holder.bind(f"\0slime_like-port-{port}")
                with socket.socket() as probe:
                    probe.bind((host, port))
            except OSError:
                self._holder.close()
                continue
            self.port = port
            return
        raise SlimeLikeError(f"no free TCP port on {host} in {PORTS.start}-{PORTS.stop - 1}: leaked listeners?")

    def release(self) -> None:
        """Let others have the port."""
        self._holder.close()

    def __enter__(self) -> int:
        """The port."""
        return self.port

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
