"""CUDA IPC transport with fake addresses: every engine rank gets every tensor, and every failure frees the memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import EngineLost, WeightSyncError
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.util import cuda_ipc
from slime_like.weight_sync import ipc
from slime_like.weight_sync.device_memory import MAGIC, CudaHandles, DeviceBucketMemory, OpenedBucket, is_message
from slime_like.weight_sync.ipc import IpcSender, SingleRank
from slime_like_plugins.weight_commit import device_tensors, hooks
from tests.weight_sync.ipc_doubles import DeviceEngine, HostHandles, LoadReply, StageWeights, ThreadRanks, in_threads

TRANSPORT = TransportSpec("ipc", "", 100, 10.0)
BUCKET = Bucket((("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(3, dtype=torch.bfloat16))))


@pytest.fixture
def stages() -> list[dict[str, torch.Tensor]]:
    return [{f"s{stage}.w{i}": torch.full((20 - i,), float(i + stage)) for i in range(7)} for stage in range(2)]


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Rank and world size that a new sender reads."""
    state = SimpleNamespace(rank=0, size=1)
    monkeypatch.setattr(dist, "get_rank", lambda *_: state.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: state.size)
    return state


def sender(receivers: list[Any], handles: HostHandles) -> IpcSender:
    return IpcSender(receivers, transport=TRANSPORT, group_name="", host="", handles=handles)


def push(sender: IpcSender, source: StageWeights) -> list[TensorMeta]:
    return asyncio.run(sender.send(source))


def test_an_engine_gets_every_tensor_of_every_stage(stages: list[dict[str, torch.Tensor]]) -> None:
    handles = HostHandles()
    engine = DeviceEngine((0,), handles)
    source = StageWeights(stages, stage=1)
    metas = push(sender([engine], handles), source)
    assert metas == list(source.manifest()), "a sender reports the tensors of its own stage"
    expected = stages[0] | stages[1]
    assert engine.num_requests > 4 and engine.ranks[0].keys() == expected.keys()
    assert all(torch.equal(engine.ranks[0][name], tensor) for name, tensor in expected.items())
    assert len(handles.allocated) <= 4 < engine.num_requests, "two buffers, which may grow"
    assert HostHandles.shared == {}, "every address was opened"


def test_a_rank_without_an_engine_gathers_and_reports(
    stages: list[dict[str, torch.Tensor]], world: SimpleNamespace
) -> None:
    world.rank, world.size = 1, 2
    handles, source = HostHandles(), StageWeights(stages)
    engine = DeviceEngine((0,), handles)
    assert push(sender([engine], handles), source) == list(source.manifest())
    assert source.has_ended and engine.num_requests == 0 and handles.allocated == []
    assert push(sender([engine], handles), StageWeights(stages, is_sender=False)) == []


def two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    world: SimpleNamespace,
    engine: DeviceEngine,
    stages: list[dict[str, torch.Tensor]],
    handles: Sequence[HostHandles] = (HostHandles(), HostHandles()),
) -> list[Any]:
    """Push from two ranks to one engine of two ranks; return each rank's result."""
    world.size = 2
    ranks, senders = ThreadRanks.of(2), list[IpcSender]()
    by_sender: dict[int, ThreadRanks] = {}
    for rank in range(2):
        world.rank = rank
        senders.append(sender([engine], handles[rank]))
        by_sender[id(senders[-1]._receivers)] = ranks[rank]
    monkeypatch.setattr(ipc, "engine_ranks", lambda receivers, seconds: by_sender[id(receivers)])
    sources = [StageWeights(stages, is_sender=rank == 0) for rank in range(2)]
    results = in_threads([lambda r=rank: push(senders[r], sources[r]) for rank in range(2)])
    assert all(source.has_ended for source in sources)
    return results


def test_each_rank_of_an_engine_gets_the_bucket_of_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, world: SimpleNamespace, stages: list[dict[str, torch.Tensor]]
) -> None:
    engine = DeviceEngine((0, 1), HostHandles())
    metas, other_metas = two_ranks(monkeypatch, world, engine, stages)
    assert metas == list(StageWeights(stages).manifest()) and other_metas == []
    for tensors in engine.ranks:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in (stages[0] | stages[1]).items())
    assert len(HostHandles.shared) == 0


def test_a_lost_engine_ends_the_push_after_all_ranks_have_gathered(
    monkeypatch: pytest.MonkeyPatch, world: SimpleNamespace, stages: list[dict[str, torch.Tensor]]
) -> None:
    engine = DeviceEngine((0, 1), HostHandles(), fails_at=2, error=EngineLost("engine 0 is lost"))
    error, other_metas = two_ranks(monkeypatch, world, engine, stages)
    assert isinstance(error, EngineLost) and other_metas == []
    assert engine.num_requests == 2, "a lost engine gets no more requests"
    assert HostHandles.shared == {}, "addresses that nobody opens are forgotten on both ranks"


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_without_memory_for_a_bucket_ends_the_push_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, world: SimpleNamespace, stages: list[dict[str, torch.Tensor]], failing_rank: int
) -> None:
    """If only one rank ended its push, the other rank would wait for its message until a deadline."""
    engine = DeviceEngine((0, 1), HostHandles())
    handles = [HostHandles(), HostHandles()]
    handles[failing_rank].capacity = 1
    results = two_ranks(monkeypatch, world, engine, stages, handles)
    assert isinstance(results[failing_rank], WeightSyncError), results
    assert "out of memory; lower weights.bucket_mb, or set weights.transport=tensor" in str(results[failing_rank])
    assert isinstance(results[1 - failing_rank], list)
    assert engine.num_requests == 1, "the second buffer was not allocated"
    assert HostHandles.shared == {}


@pytest.mark.parametrize("fails_at", [-1, 2])
def test_a_push_gives_its_memory_back_at_its_end(stages: list[dict[str, torch.Tensor]], fails_at: int) -> None:
    """A failed push frees its memory too, although the traceback of its error refers to the push's frames."""
    buckets: list[weakref.ref[torch.Tensor]] = []

    class RecordedBuckets(StageWeights):
        def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
            for bucket in super().replicated_buckets(max_bytes):
                buckets.extend(weakref.ref(tensor) for _, tensor in bucket.tensors)
                yield bucket

    class Handles(HostHandles):
        def collect(self) -> None:
            assert len(buckets) == 14 and not any(bucket() is not None for bucket in buckets), "of a bucket"
            self.collections += 1

    handles = Handles()
    engine = DeviceEngine((0,), handles, fails_at, EngineLost("engine 0 is lost"))
    source = RecordedBuckets(stages)
    gc.disable()
    try:
        with contextlib.suppress(EngineLost):
            push(sender([engine], handles), source)
    finally:
        gc.enable()
    assert source.has_ended and handles.collections == 2, "of both buffers"


def test_a_bucket_is_dropped_before_the_next_one_is_gathered(stages: list[dict[str, torch.Tensor]]) -> None:
    class CountedBuckets(StageWeights):
        num_live = 0

        def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
            for name, tensor in self._stages[0].items():
                gathered = [tensor.clone()]
                reference = weakref.ref(gathered[0])
                yield Bucket(((name, gathered.pop()),))
                self.num_live += reference() is not None

    handles = HostHandles()
    source = CountedBuckets(stages)
    push(sender([DeviceEngine((0,), handles)], handles), source)
    assert source.num_live == 0


def test_memory_goes_back_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch would cache the memory of a push, which the engine needs for its KV cache afterwards."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("shared memory"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    CudaHandles().collect()
    assert calls == ["shared memory", "cache"]


@pytest.mark.parametrize("gpus", [(), (0, 1)])
def test_an_engine_on_other_gpus_is_refused(gpus: tuple[int, ...]) -> None:
    with pytest.raises(WeightSyncError, match=r"shares no GPUs with trainer ranks.*weights.transport=tensor"):
        sender([DeviceEngine(gpus, HostHandles())], HostHandles())


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("max_split_size_mb:64, expandable_segments: True", "memory in expandable segments"),
        ("backend:cudaMallocAsync", "memory of cudaMallocAsync"),
    ],
)
def test_memory_without_handles_is_refused(setting: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with pytest.raises(WeightSyncError, match=f"PYTORCH_CUDA_ALLOC_CONF=.*{kind} has no .*weights.transport=tensor"):
        sender([DeviceEngine((0,), HostHandles())], HostHandles())


def test_another_shared_memory_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this check, torch would open the memory, and the sender would never free it."""
    monkeypatch.setattr(cuda_ipc, "SHARED_MEMORY", tmp_path)
    handles: Any = HostHandles()
    handles.open = lambda address: cuda_ipc.open_shared(address, 0)
    payload = damaged(memory={"handle": "00", "counter": b"/torch_1_2_3".hex(), "event": ""})
    with pytest.raises(
        WeightSyncError, match=rf"{tmp_path}/torch_1_2_3.*one /dev/shm, or set weights.transport=tensor"
    ):
        OpenedBucket(payload, handles)


def test_one_engine_rank_needs_no_group() -> None:
    receivers: list[Any] = [DeviceEngine((0,), HostHandles())]
    assert isinstance(ipc.engine_ranks(receivers, 1.0), SingleRank)


# ---- messages --------------------------------------------------------------------------------------------------------
def test_a_bucket_survives_the_message() -> None:
    handles, engine_handles = HostHandles(), HostHandles()
    payload = DeviceBucketMemory(handles).write(BUCKET)
    assert is_message(payload) and handles.waits == 1
    engine_bucket = OpenedBucket(payload, engine_handles)
    assert [(name, tensor.dtype, tensor.tolist()) for name, tensor in engine_bucket.tensors] == [
        (name, tensor.dtype, tensor.tolist()) for name, tensor in BUCKET.tensors
    ]
    engine_bucket.close()
    assert engine_handles.waits == 1, "copies have ended before the reply"


def test_a_tensor_that_the_engine_keeps_is_an_error() -> None:
    engine_bucket = OpenedBucket(DeviceBucketMemory(HostHandles()).write(BUCKET), HostHandles())
    engine_tensor = engine_bucket.tensors[1][1]
    with pytest.raises(WeightSyncError, match="kept a tensor"):
        engine_bucket.close()
    assert len(engine_tensor) == 3


def test_a_tensor_in_a_reference_cycle_is_not_in_use() -> None:
    engine_bucket = OpenedBucket(DeviceBucketMemory(HostHandles()).write(BUCKET), HostHandles())
    cycle: list[Any] = [engine_bucket.tensors[1][1]]
    cycle.append(cycle)
    del cycle
    engine_bucket.close()


def damaged(**changes: Any) -> bytes:
    payload = DeviceBucketMemory(HostHandles()).write(BUCKET)
    return MAGIC + json.dumps(json.loads(payload[len(MAGIC) :]) | changes).encode()


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (lambda: MAGIC + b"{", "malformed"),
        (lambda: damaged(memory={}), "malformed"),
        (lambda: damaged(tensors=[["a", "float32", [2, 3], 400]]), "malformed"),
        (lambda: damaged(tensors=[["a", "float32", [1], 2]]), "malformed"),
        (lambda: damaged(tensors=[["a", "object", [2, 3], 0]]), "malformed"),
        (
            lambda: damaged(gpu="GPU-1"),
            "^the engine's rank is on GPU GPU-0, the trainer's rank that sends to it on GPU GPU-1: set weights.transport=tensor$",
        ),
    ],
)
def test_bad_messages(payload: Any, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        OpenedBucket(payload(), HostHandles())


# ---- receiving hook --------------------------------------------------------------------------------------------------
@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Weight updater of an engine with one rank, which replies (success, message)."""
    monkeypatch.setattr(dist, "all_gather_object", lambda out, own, group: out.__setitem__(slice(None), [own]))
    monkeypatch.setattr(dist, "barrier", lambda group: None)
    monkeypatch.setattr(device_tensors, "failure", lambda message: LoadReply(False, message))
    return SimpleNamespace(tp_cpu_group=None)


def load(manager: SimpleNamespace, payload: bytes, original: Any) -> LoadReply:
    request = SimpleNamespace(serialized_named_tensors=[payload])
    return device_tensors.load(original, manager, request, HostHandles())


def test_the_hook_loads_and_closes(manager: SimpleNamespace) -> None:
    engine_weights: dict[str, list[float]] = {}

    def original(_: Any, request: Any) -> LoadReply:
        engine_weights.update({name: tensor.tolist() for name, tensor in request.serialized_named_tensors[0]})
        return LoadReply(True, "Success")

    payload = DeviceBucketMemory(HostHandles()).write(BUCKET)
    assert load(manager, payload, original) == (True, "Success")
    assert engine_weights == {name: tensor.tolist() for name, tensor in BUCKET.tensors}


def test_the_hook_reports_errors_and_kept_tensors(manager: SimpleNamespace) -> None:
    engine_tensors: list[torch.Tensor] = []

    def keep(_: Any, request: Any) -> LoadReply:
        engine_tensors.append(request.serialized_named_tensors[0][0][1])
        return LoadReply(True, "Success")

    def fail(*_: Any) -> LoadReply:
        raise KeyError("model.unknown.weight")

    def refuse(*_: Any) -> LoadReply:
        return LoadReply(False, "a shape differs")

    def reply(original: Any) -> str:
        success, message = load(manager, DeviceBucketMemory(HostHandles()).write(BUCKET), original)
        assert not success
        return message

    assert "rank 0 of 1: the engine kept a tensor" in reply(keep)
    assert "rank 0 of 1: KeyError: 'model.unknown.weight'" in reply(fail)
    assert "rank 0 of 1: a shape differs" in reply(refuse)
    success, message = load(manager, MAGIC + b"{", fail)
    assert not success and "malformed" in message


def test_an_update_without_payloads_fails_and_does_not_kill_the_engine(manager: SimpleNamespace) -> None:
    """SGLang passes an empty list on to its scheduler."""
    request = SimpleNamespace(serialized_named_tensors=[])
    success, message = hooks.load_tensors(pytest.fail, manager, request)
    assert not success and "serialized_named_tensors is empty" in message
