"""Detection of a lost TCP peer: one that loses power or its network link does not close its connections."""

from __future__ import annotations

import socket

NUM_PROBES = 3  # within the time limit, on an idle connection


def end_with_lost_peer(sock: socket.socket, seconds: float) -> None:
    """Make the kernel end a TCP connection once its peer has acknowledged neither data nor probes for ``seconds``.

    The connection to a suspended (SIGSTOP) or busy process is kept at first: the peer's kernel acknowledges data until the
    receive buffer is full.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds / NUM_PROBES)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
