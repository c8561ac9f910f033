"""Worker process: ``python -m slime_like_plugins.remote_experts.worker``.

An engine that starts a worker passes one end of a socket pair (``--fd``). A worker that is started by hand listens, on loopback
if it gets a port without a host, and serves only engines that know the key in its key file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from slime_like.config.schema.remote_experts import parse_address
from slime_like.errors import ConfigError, DeadlineExceeded, SlimeLikeError
from slime_like.printable import print_output
from slime_like.util.ports import listen
from slime_like_plugins.remote_experts import key
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.frames import FrameError
from slime_like_plugins.remote_experts.serving import Service, WorkerSettings
from slime_like_plugins.remote_experts.shapes import WRITE_BYTES

LOOPBACK = "127.0.0.1"


def serve(sock: socket.socket, settings: WorkerSettings, secret: bytes | None = None) -> None:
    """Serve the engine at the other end of ``sock`` until it sends CLOSE, and close ``sock`` in any case.

    If ``secret`` is given, the engine has to know it. Raises the errors of ``key.admit`` and ``Service.run``.
    """
    connection = Connection(sock, "the engine", key.MAX_PAYLOAD if secret else WRITE_BYTES)
    try:
        if secret:
            key.admit(connection, secret)
            connection.max_payload = WRITE_BYTES
        Service(connection, settings).run()
    finally:
        connection.close()


def listen_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, or loopback and port of ``PORT``. Raises ``ConfigError`` on other text."""
    return parse_address(f"{LOOPBACK}:{text}" if text.isdecimal() else text)


def listen_and_serve(address: str, secret: bytes, settings: WorkerSettings) -> None:
    """Listen on ``address``, and serve the ranks of engines one after another until the process ends.

    Raises ``SlimeLikeError`` if the address is not valid, or nothing can listen there.
    """
    host, port = listen_address(address)
    with listen(host, port) as listener:
        print_output(f"a worker of remote experts listens at {host}:{listener.getsockname()[1]}\n")
        while True:
            sock, peer = listener.accept()
            try:
                serve(sock, settings, secret)
            except (PeerLost, FrameError, DeadlineExceeded) as error:
                print_output(f"{peer[0]}: {error}\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m slime_like_plugins.remote_experts.worker", description=__doc__)
    address_group = parser.add_mutually_exclusive_group(required=True)
    address_group.add_argument(
        "--listen", metavar="[HOST:]PORT", help=f"address; host: {LOOPBACK} by default; port 0: the kernel chooses"
    )
    address_group.add_argument(
        "--fd", type=int, help="file descriptor of a connected socket, for workers that an engine starts"
    )
    parser.add_argument("--key-file", type=Path, help="file with the key of the engines, required with --listen")
    parser.add_argument("--threads", type=int, default=1, help="threads of the products (default: 1)")
    parser.add_argument("--device", default="cpu", help="device of the weights, such as cuda:0 (default: cpu)")
    parser.add_argument(
        "--slowdown",
        type=float,
        default=1.0,
        help="let computations take this many times as long, to measure slow workers",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] = ()) -> int:
    """Run a worker until its engine ends, or with ``--listen`` until it is interrupted. Return the exit code."""
    options = parse(argv)
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the engine, which closes its worker
    try:
        settings = WorkerSettings(_checked_device(options.device), max(1.0, options.slowdown))
        if options.threads < 1:
            raise ConfigError(f"--threads {options.threads} must be at least 1")
        torch.set_num_threads(options.threads)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the C kernel, if its OpenMP library is not torch's
        if options.fd is not None:
            serve(socket.socket(fileno=options.fd), settings)
        elif options.key_file is None:
            raise ConfigError("--listen needs --key-file, a file with a key that only you can read")
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            listen_and_serve(options.listen, key.read_key(options.key_file), settings)
    except PeerLost:
        return 0  # the engine has ended
    except KeyboardInterrupt:
        return 130
    except SlimeLikeError as error:
        error.say()
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _checked_device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}: torch cannot use it ({str(error).splitlines()[0]})") from error
    return name


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # torch's destructors take half a second
