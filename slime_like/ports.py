"""Free ports for servers that bind a moment later."""

from __future__ import annotations

import random
import socket

PORTS = range(15_000, 32_000)  # below Linux's ephemeral range, where any outgoing connection could take one meanwhile


def free_port(host: str) -> int:
    """A TCP port of ``host`` that nobody listens on. Raises ``OSError`` when there is none."""
    for port in random.SystemRandom().sample(PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"no free TCP port on {host} in {PORTS.start}-{PORTS.stop - 1}")
