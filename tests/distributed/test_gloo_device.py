"""The gloo groups of a process share one device, whose I/O thread serves all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.distributed import gloo_device

TIMEOUT = timedelta(seconds=7)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Yield torch's backends by name. They and the devices are restored afterwards."""
    c10d.Backend._ensure_backend_registered("gloo")
    backends: Any = c10d.Backend._plugins
    monkeypatch.setitem(backends, "GLOO", backends["GLOO"]._replace(creator_fn=c10d._create_gloo_process_group))
    monkeypatch.setattr(gloo_device, "_devices", {})
    monkeypatch.setenv(gloo_device.INTERFACE, "lo")
    yield backends


def make(plugins: dict[str, Any], store: dist.Store, name: str) -> Any:
    """Return a backend of one rank, created as torch creates it."""
    request: Any = c10d._DistributedBackendOptions()
    request.store, request.group_rank, request.group_size = dist.PrefixStore(name, store), 0, 1
    request.timeout, request.group_id, request.global_ranks_in_group = TIMEOUT, name, [0]
    return plugins["GLOO"].creator_fn(request, None)


def test_groups_share_one_device(plugins: dict[str, Any]) -> None:
    store = dist.HashStore()
    gloo_device.share_gloo_device()
    gloo_device.share_gloo_device()
    groups = [make(plugins, store, name) for name in ("first", "second", "third")]
    first, *other_options = (group.options for group in groups)
    for options in other_options:
        assert options._devices == first._devices
        assert (options._threads, options._timeout, options.enable_reconfigure) == (
            first._threads,
            first._timeout,
            first.enable_reconfigure,
        )
        assert options.global_ranks_in_group == [0]
    assert [group.options.group_name for group in groups] == ["first", "second", "third"]
    for group in groups:
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [1.0] * 3


def test_another_interface_has_a_device_of_its_own(plugins: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    gloo_device.share_gloo_device()
    on_loopback = make(plugins, store, "loopback")
    monkeypatch.delenv(gloo_device.INTERFACE)
    external = make(plugins, store, "other")
    assert external.options._devices != on_loopback.options._devices


def test_a_descriptor_that_is_no_longer_a_socket_is_left_open_once(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        descriptors = sorted(gloo_device.FDS.iterdir())
        with pytest.raises(OSError, match="socket"):
            gloo_device._shut_down(file.fileno(), os.fstat(file.fileno()).st_ino)  # pyright: ignore[reportPrivateUsage]
        assert sorted(gloo_device.FDS.iterdir()) == descriptors


def test_another_creator_of_gloo_groups_is_kept(plugins: dict[str, Any]) -> None:
    def creator(request: Any, options: Any) -> None:
        """Create nothing."""

    plugins["GLOO"] = plugins["GLOO"]._replace(creator_fn=creator)
    gloo_device.share_gloo_device()
    assert plugins["GLOO"].creator_fn is creator
