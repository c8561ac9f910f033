"""Backends of process groups that can be released: destroyed while nothing is communicated, and recreated later.

megatron-core keeps references to its ``ProcessGroup`` objects, including the world, so these persist with their ranks, names
and stores. With ``guard.release`` their backend is a ``ReleasableBackend``, a placeholder that refuses every op. The ops of
each such object are executed by a second group of the same ranks, which only the wrapper references. The module ``reload``
releases and rebuilds backends.

Remove when all of torch's backends can be suspended and resumed (``Backend.suspend``; in torch 2.14 gloo's cannot).
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_core
from torch.distributed import distributed_c10d as c10d

NAMES = ("gloo", "nccl")
# Methods that are not ops and must reach the group that executes the ops.
REDIRECTED = ("_start_coalescing", "_get_backend")
KEY_PREFIX = "rebuild"  # prefix of the store keys with the addresses of rebuilt communicators


class ReleasableBackend(c10d_core.Backend):
    """Placeholder in a ``ProcessGroup`` for a releasable backend. ``live``: torch's backend, None while it is released."""

    def __init__(self, create: Callable[[Any, Any], Any], request: Any, options: Any) -> None:
        super().__init__(request.group_rank, request.group_size)
        self._create, self._options, self._store = create, options, request.store
        self._group_args = (request.group_rank, request.group_size, request.timeout, request.group_id)
        self._ranks = list(request.global_ranks_in_group)
        self.live: Any = create(request, options)

    def build(self, number: int) -> None:
        """Create the communicators. ``number`` separates the store keys of successive builds and is the same on every rank.

        Every rank of the group must call this method if the backend connects eagerly, as gloo does.
        """
        request: Any = c10d._DistributedBackendOptions()
        request.store = dist.PrefixStore(f"{KEY_PREFIX}{number}/", self._store)
        request.group_rank, request.group_size, request.timeout, request.group_id = self._group_args
        request.global_ranks_in_group = self._ranks
        self.live = self._create(request, self._options)

    def drop(self) -> None:
        """Destroy the communicators. Gloo communicators end with their last reference; NCCL communicators need ``shutdown``."""
        live, self.live = self.live, None
        if live is not None:
            live.shutdown()

    # Methods of a backend other than ops.
    def getBackendName(self) -> str:
        """Return a name for torch's error when an op bypasses the wrapper."""
        return "of a group with releasable communicators (guard.release=true), called without slime_like's wrapper,"

    @property
    def options(self) -> Any:
        """Options of the live backend."""
        return self.live.options

    @property
    def supports_coalescing(self) -> bool:
        """Return whether the live backend supports coalescing."""
        return bool(self.live.supports_coalescing)

    def shutdown(self) -> None:
        """Destroy the communicators. torch calls this method when it destroys the group."""
        self.drop()

    def abort(self) -> None:
        """Abort the communicators."""
        live, self.live = self.live, None
        if live is not None:
            live.abort()


@dataclass(slots=True, eq=False)
class Reloadable:
    """Releasable backends of one ``ProcessGroup``, and the group that executes its ops."""

    backends: dict[str, ReleasableBackend] = field(default_factory=dict[str, ReleasableBackend])  # by name
    live_group: Any = None  # executes the ops; created at the first op after the backends were built


reloadables: dict[Any, Reloadable] = {}  # by ProcessGroup, in order of creation, which is the same on all ranks


def install_releasable_backends() -> list[tuple[str, Any]]:
    """Make torch create groups with releasable backends from now on, with the exceptions that ``_creator`` names.

    Return torch's own registry entries of gloo and NCCL, which ``restore`` needs.
    """
    originals: list[tuple[str, Any]] = []
    for name in NAMES:
        c10d.Backend._ensure_backend_registered(name)
        plugins: Any = c10d.Backend._plugins
        plugin = plugins[name.upper()]
        assert plugin.extended_api, (
            f"torch makes {name} groups in another way: review slime_like.distributed.wrapper.releasable"
        )
        originals.append((name.upper(), plugin))
        plugins[name.upper()] = plugin._replace(creator_fn=_creator(name, plugin.creator_fn))
    return originals


def restore(originals: list[tuple[str, Any]]) -> None:
    """Make torch create groups with its own backends again. ``originals`` is from ``install_releasable_backends``."""
    for name, plugin in originals:
        c10d.Backend._plugins[name] = plugin


def _creator(name: str, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that creates releasable backends.

    For a group that was split from another or contains processes outside this world, it creates torch's own backends.
    """

    def create(request: Any, options: Any) -> Any:
        foreign = not request.global_ranks_in_group and dist.is_initialized()
        if foreign or request.split_from is not None:
            return original(request, options)
        backend = ReleasableBackend(original, request, options)
        reloadables.setdefault(request.process_group, Reloadable()).backends[name] = backend
        return backend

    return create


def target(group: Any) -> Any:
    """Return the group that executes the ops of ``group``: ``group`` itself if it has no live releasable communicators."""
    reloadable = reloadables.get(group)
    if reloadable is None or group not in c10d._world.pg_backend_config:
        return group
    if reloadable.live_group is None and all(backend.live is not None for backend in reloadable.backends.values()):
        reloadable.live_group = _create_live_group(group, reloadable)
    return group if reloadable.live_group is None else reloadable.live_group


def _create_live_group(group: Any, reloadable: Reloadable) -> Any:
    """Return a group with the live backends of ``group``. Its creation does not communicate."""
    live_group: Any = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    config = c10d.BackendConfig(c10d.Backend(c10d._world.pg_backend_config[group]))
    kinds = c10d.Backend.backend_type_map
    for device, name in config.get_device_backend_map().items():
        live_group._register_backend(torch.device(device), kinds[name], reloadable.backends[name].live)
    live_group._set_default_backend(kinds[group.name()])
    live_group._set_group_name(group.group_name)
    live_group._set_group_desc(group.group_desc)
    return live_group


def drop_destroyed_groups() -> None:
    """Drop the backends of groups that were destroyed."""
    for group in [group for group in reloadables if group not in c10d._world.pg_map]:
        del reloadables[group]
