"""Start one node of a Ray cluster: ``python -m tests.nodes.raylet START-ARGUMENTS``, the arguments of ``ray start``.

Processes that no run uses are omitted, as by ``local_ray.start``: they would take seconds of CPU time on every node.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from ray._private import node as ray_node
from ray._private.parameter import RayParams

from slime_like.cluster.start.local_ray import without_unused_processes


def main(address: str, gcs: str, num_cpus: int, num_gpus: int, folder: str) -> None:
    """Start the head if ``gcs`` is its own address, else a node that joins it; return at SIGTERM."""
    host, _, port = gcs.rpartition(":")
    is_head = host == address
    params: Any = RayParams(
        node_ip_address=address,
        node_name=address,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=200 * 2**20,
        memory=6 * 2**30,
        temp_dir=folder,
        include_dashboard=False,
        gcs_address=None if is_head else gcs,
        gcs_server_port=int(port) if is_head else None,
    )
    with without_unused_processes():
        ray_node.Node(params, head=is_head, shutdown_at_exit=False, spawn_reaper=False)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
