"""Stand-ins for the two agents of Ray's raylet, which a run does not use. Each ends with the raylet.

The stand-in for the dashboard agent publishes that none of the agent's services exist. The stand-in for the runtime-env agent
holds the agent's port and becomes the agent on the first request, because only user code may give an actor a ``runtime_env``.

The raylet starts this file as a script without site packages, with the agent's own script and options as arguments.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping, Sequence

SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NO_SERVICE = -1  # published for a service without its dependencies (ray without ``[default]``)
PORT = "runtime_env_agent_port"
PORT_OPTION = "--runtime-env-agent-port"


def named_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return a dict from ``--name`` to the value of each argument ``--name=value``; other arguments have empty values."""
    return {name: value for name, _, value in (argument.partition("=") for argument in arguments)}


def publish(options: Mapping[str, str], ports: Mapping[str, int]) -> None:
    """Write the port files that the raylet waits for, as ``ray._raylet.persist_port`` does."""
    for name, port in ports.items():
        path = os.path.join(options["--session-dir"], f"{name}_{options['--node-id']}")
        with open(f"{path}.tmp", "w") as file:
            file.write(str(port))
        os.replace(f"{path}.tmp", path)


def listen(options: Mapping[str, str]) -> socket.socket:
    """Return a socket that listens on the runtime-env agent's address."""
    address = options["--node-ip-address"], int(options[PORT_OPTION])
    family, kind, protocol, _, socket_address = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(socket_address)
    listener.listen()
    return listener


def main() -> None:
    """Publish the ports and wait for the raylet to end.

    If the arguments are those of the runtime-env agent, become that agent on the first request.
    """
    arguments = sys.argv[1:]
    options = named_options(arguments)
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    if PORT_OPTION not in options:
        publish(options, dict.fromkeys(SERVICES, NO_SERVICE))
        select.select([raylet], [], [])
        return
    with listen(options) as listener:
        port = listener.getsockname()[1]
        publish(options, {PORT: port})
        ready_files, _, _ = select.select([raylet, listener], [], [])
    if raylet not in ready_files:  # the raylet repeats the request, which fails when this socket closes
        other_arguments = [argument for argument in arguments if not argument.startswith(f"{PORT_OPTION}=")]
        os.execv(sys.executable, [sys.executable, "-u", *other_arguments, f"{PORT_OPTION}={port}"])


if __name__ == "__main__":
    main()
