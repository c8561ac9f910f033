"""Updates with tensors in shared host memory: every rank waits once at SGLang's barrier, and all report an error of any rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_like.interfaces import Bucket
from slime_like.weight_sync.shared import SharedBucketMemory
from slime_like_plugins.weight_commit import device_tensors, hooks
from tests.weight_sync.ipc_doubles import LoadReply

BUCKET = Bucket((("a", torch.arange(6.0)),))


@dataclass
class HostUpdate:
    """Update of one of two ranks with tensors in shared host memory, with a fake exchange between the ranks."""

    monkeypatch: pytest.MonkeyPatch
    problem_of_peer: str = ""
    calls: list[str] = field(default_factory=list)
    engine_tensors: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        self.monkeypatch.setattr(dist, "barrier", lambda group: self.calls.append("barrier"))
        self.monkeypatch.setattr(dist, "all_gather_object", self.exchange)
        self.monkeypatch.setattr(device_tensors, "failure", lambda message: LoadReply(False, message))

    def exchange(self, per_rank: list[Any], own: object, group: object) -> None:
        self.calls.append("exchange")
        per_rank[:] = [own, self.problem_of_peer]

    def load(
        self, *, keeps: bool = False, fails: bool = False, refuses: bool = False, session: object = "open"
    ) -> LoadReply:
        """Return the hook's reply. The engine keeps a tensor, raises an error before its barrier, or replies with a failure."""

        def original(manager: Any, request: Any) -> LoadReply:
            if manager._session is None:
                return LoadReply(False, "no session")
            if fails:
                raise KeyError("model.unknown.weight")
            if keeps:
                self.engine_tensors.append(request.serialized_named_tensors[0][0][1])
            self.calls.append("barrier")
            return LoadReply(not refuses, "a shape differs" if refuses else "Success")

        manager = SimpleNamespace(tp_cpu_group=None, _session=session)
        memory = SharedBucketMemory()
        request = SimpleNamespace(serialized_named_tensors=[memory.write(BUCKET)])
        try:
            return hooks.load_tensors(original, manager, request)
        finally:
            memory.close()


def test_every_rank_waits_once_at_the_barrier_whatever_fails_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: tuple[tuple[dict[str, bool], str], ...] = (
        ({}, "Success"),
        ({"keeps": True}, "rank 0 of 2: WeightSyncError: the engine kept a tensor"),
        ({"fails": True}, "rank 0 of 2: KeyError: 'model.unknown.weight'"),
        ({"refuses": True}, "rank 0 of 2: a shape differs"),
    )
    for fault, message in cases:
        update = HostUpdate(monkeypatch)
        success, reply = update.load(**fault)
        assert reply.startswith(message) and success is not any(fault.values())
        assert update.calls == ["barrier", "exchange"]


def test_an_error_of_one_rank_is_reported_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HostUpdate(monkeypatch, "it cannot open the memory").load() == (
        False,
        "rank 1 of 2: it cannot open the memory",
    )


def test_no_rank_waits_for_another_outside_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang then replies without its barrier, on every rank."""
    update = HostUpdate(monkeypatch)
    monkeypatch.setattr(hooks.shared, "map_tensors", pytest.fail)
    assert update.load(session=None) == (False, "no session") and not update.calls
