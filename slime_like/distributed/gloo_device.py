"""One gloo device for all process groups of a process."""

# torch has no public API for its registry of backends or for gloo's options.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import os
from typing import Any

from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

INTERFACE = "GLOO_SOCKET_IFNAME"  # read by torch when it creates a device

_devices: dict[str, list[Any]] = {}  # by network interface


def share_gloo_device() -> None:
    """Let the gloo groups that this process creates from now on share one device, which has one I/O thread. Idempotent.

    torch creates a device per group, whose thread wakes up 100 times per second even if nothing is communicated, and a rank
    has 20 groups. Remove when torch shares devices, or when gloo waits for events without a timeout.
    """
    c10d.Backend._ensure_backend_registered("gloo")
    plugins: Any = c10d.Backend._plugins
    plugin = plugins["GLOO"]
    if plugin.creator_fn is c10d._create_gloo_process_group:
        plugins["GLOO"] = plugin._replace(creator_fn=create_on_shared_device)


def create_on_shared_device(request: Any, options: Any) -> Any:
    """Return a gloo backend on the devices of ``options``, or else on those of the first backend with the same interface."""
    interface = os.environ.get(INTERFACE, "")
    own_devices: list[Any] | None = getattr(options, "_devices", None)
    if not own_devices and interface not in _devices:
        backend: Any = c10d._create_gloo_process_group(request, options)
        _devices[interface] = backend.options._devices
        return backend
    gloo: Any = ProcessGroupGloo
    shared = gloo._Options()
    shared._devices = own_devices or _devices[interface]
    shared._threads = 2 * len(shared._devices)  # as torch sets it
    shared._timeout = request.timeout
    shared.enable_reconfigure = request.enable_reconfigure
    shared.global_ranks_in_group, shared.group_name = request.global_ranks_in_group, request.group_id
    return gloo(request.store, request.group_rank, request.group_size, shared)
