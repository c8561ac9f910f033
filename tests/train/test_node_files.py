"""Files that rank 0 receives from ranks of other nodes, without ranks: errors of its disk."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

node_files: Any = importlib.import_module("slime_like.train.megatron.model_io.node_files")
FULL = Path("/dev/full")


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """Yield a buffer that a fake sender sends in chunks of 10,000 bytes."""
    content, position = bytearray(), [-1]

    def recv(tensor: Tensor, sender: int) -> None:
        if position[0] < 0:
            tensor.fill_(len(content))
            position[0] = 0
        else:
            tensor.copy_(torch.frombuffer(content, dtype=torch.uint8)[position[0] : position[0] + len(tensor)])
            position[0] += len(tensor)

    monkeypatch.setattr(node_files.dist, "recv", recv)
    monkeypatch.setattr(node_files, "CHUNK_BYTES", 10_000)
    yield content
    assert max(position[0], 0) == len(content), "the sender would wait for a receiver"


@pytest.mark.parametrize("size", [0, 5, 10_000, 25_000])
def test_a_file_is_received_in_chunks(size: int, content: bytearray, tmp_path: Path) -> None:
    content += bytes(index % 251 for index in range(size))
    assert node_files._receive(tmp_path / "new" / "file", 1, torch.device("cpu")) == ""
    assert (tmp_path / "new" / "file").read_bytes() == content


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("size", [5, 10_005, 25_000])
def test_a_full_disk_is_reported_after_the_last_chunk(size: int, content: bytearray) -> None:
    """The receiver takes all chunks before it reports the error, even if the last bytes are written at the close."""
    content += bytes(size)
    assert node_files._receive(FULL, 1, torch.device("cpu")) == "/dev/full: No space left on device"
