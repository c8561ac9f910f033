"""Tensors in shared memory are received as written; memory that is not sealed is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.errors import WeightSyncError
from slime_like.interfaces import Bucket
from slime_like.weight_sync.shared import DTYPES, MAGIC, SharedBucketMemory, is_message, map_tensors

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=6))
def test_tensors_are_received_as_written(specs: list[tuple[str, tuple[int, ...]]]) -> None:
    region = SharedBucketMemory()
    weights = [(f"w{i}", (torch.rand(shape) * 100).to(DTYPES[dtype])) for i, (dtype, shape) in enumerate(specs)]
    with map_tensors(region.write(Bucket(tuple(weights)))) as tensors:
        assert [(name, t.dtype, t.shape) for name, t in tensors] == [(name, t.dtype, t.shape) for name, t in weights]
        assert all(torch.equal(a.float(), b.float()) for (_, a), (_, b) in zip(tensors, weights, strict=True))
    region.close()


def test_a_region_grows_and_is_reused() -> None:
    region = SharedBucketMemory()
    for rows in (2, 3000, 5):
        weight = torch.rand(rows, 7).t()
        with map_tensors(region.write(Bucket((("w", weight),)))) as ((_, tensor),):
            assert torch.equal(tensor, weight)
            del tensor
    region.close()


def test_an_unsupported_dtype_is_named() -> None:
    with pytest.raises(WeightSyncError, match="w is complex64; weights are sent as one of float32, bfloat16"):
        SharedBucketMemory().write(Bucket((("w", torch.zeros(2, dtype=torch.complex64)),)))


def test_a_receiver_cannot_modify_the_senders_memory() -> None:
    region = SharedBucketMemory()
    message = region.write(Bucket((("w", torch.zeros(4)),)))
    with map_tensors(message) as tensors:
        tensors[0][1].fill_(1.0)
    with map_tensors(message) as tensors:
        assert not tensors[0][1].any()
    region.close()


def test_a_tensor_that_outlives_the_block_is_an_error() -> None:
    region, escaped_tensors = SharedBucketMemory(), []
    with (
        pytest.raises(WeightSyncError, match="kept a tensor in the sender's memory"),
        map_tensors(region.write(Bucket((("w", torch.zeros(4)),)))) as tensors,
    ):
        escaped_tensors += tensors
    assert not escaped_tensors[0][1].any()  # still readable: the memory was not unmapped
    region.close()


def test_only_sealed_memory_is_opened(tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 64)
    growing_file = os.memfd_create("growing", os.MFD_ALLOW_SEALING)
    os.ftruncate(growing_file, 64)
    read_end, write_end = os.pipe()
    try:
        for fd in (file, growing_file, read_end):
            with pytest.raises(WeightSyncError, match="is not sealed memory of this user"), map_tensors(message(fd)):
                pass
    finally:
        for fd in (file, growing_file, read_end, write_end):
            os.close(fd)
    with pytest.raises(WeightSyncError, match="cannot open"), map_tensors(message(file)):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give memory to another user")
def test_sealed_memory_of_another_user_is_refused() -> None:
    region = SharedBucketMemory()
    payload = region.write(Bucket((("w", torch.zeros(4)),)))
    os.fchown(json.loads(payload[len(MAGIC) :])["fd"], 65_534, -1)
    with pytest.raises(WeightSyncError, match="is not sealed memory of this user"), map_tensors(payload):
        pass
    region.close()


def test_a_garbled_message_is_refused() -> None:
    region = SharedBucketMemory()
    complete = region.write(Bucket((("w", torch.zeros(4)),)))
    fd = json.loads(complete[len(MAGIC) :])["fd"]
    for entry in (
        ["w", "float32", [5], 0],
        ["w", "float32", [4], 64],
        ["w", "float32", [1], 2],
        ["w", "float32", [-1], 0],
        ["w", "int3", [4], 0],
    ):
        with pytest.raises(WeightSyncError, match="malformed"), map_tensors(message(fd, entry)):
            pass
    for payload in (MAGIC, MAGIC + b"{}", MAGIC + b"[1]"):
        with pytest.raises(WeightSyncError, match="malformed"), map_tensors(payload):
            pass
    assert not is_message(b"\x80\x05")
    region.close()


def message(fd: int, *entries: object) -> bytes:
    return MAGIC + json.dumps({"pid": os.getpid(), "fd": fd, "tensors": entries}).encode()
