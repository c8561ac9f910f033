"""Stand-in for the dashboard agent of Ray's raylet: publishes that none of its services exist, and ends with the raylet.

The raylet starts this file as a script without site packages, with the agent's own command line as arguments. -1 is the port
that the agent publishes for a service without its dependencies (ray without ``[default]``).
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
NO_SERVICE = "-1"


def publish(arguments: Sequence[str]) -> None:
    """Write the port files that the raylet waits for, as ``ray._raylet.persist_port`` does."""
    options = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    for name in PORTS:
        path = os.path.join(options["--session-dir"], f"{name}_{options['--node-id']}")
        with open(f"{path}.tmp", "w") as file:
            file.write(NO_SERVICE)
        os.replace(f"{path}.tmp", path)


def main() -> None:
    """Publish the ports and wait for the end of the raylet."""
    publish(sys.argv[1:])
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    select.select([raylet], [], [])


if __name__ == "__main__":
    main()
