"""Transfer of the files of a checkpoint or an export between nodes that do not share ``run.dir``.

Ranks write to a folder of their own node. Its files are then sent to rank 0, whose node has the driver's folder. To load a
checkpoint, rank 0 sends each other node a copy, which is removed once the ranks have read it. Files are sent in chunks through
the ranks' process group. If all nodes mount one file system, nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from slime_like.checkpoint.files import SCRATCH
from slime_like.errors import CheckpointError
from slime_like.train.megatron.platform.groups import RankInfo

CHUNK_BYTES = 64 * 2**20
COPY = f"node_copy{SCRATCH}"  # folder of a copy, next to the iterations


def node_leaders(info: RankInfo) -> list[int]:
    """Return the first rank of each node that does not share rank 0's folder."""
    nodes = info.separate_nodes
    return [rank for rank, node in enumerate(nodes) if node and nodes.index(node) == rank]


def is_node_leader(info: RankInfo) -> bool:
    """Return True on rank 0 and on the ranks of ``node_leaders``."""
    return dist.get_rank() in (0, *node_leaders(info))


def on_other_nodes(action: Callable[[], None], info: RankInfo) -> None:
    """Run ``action`` on one rank of each node that does not share rank 0's folder. Collective.

    Raises ``CheckpointError`` on every rank if ``action`` raises ``OSError`` on any.
    """
    if leaders := node_leaders(info):
        error = ""
        if dist.get_rank() in leaders:
            try:
                action()
            except OSError as failure:
                error = f"{failure.filename or 'the disk'}: {failure.strerror}; choose a folder on a writable disk"
        _raise_everywhere(error, info)


def gather_files(folder: Path, names: Sequence[Sequence[str]], info: RankInfo) -> None:
    """Copy the files of ranks on other nodes into rank 0's ``folder``, then remove ``folder`` on those nodes. Collective.

    ``names`` are the files of each rank. Raises ``CheckpointError`` on every rank if a file cannot be read or written; no
    folder is then removed.
    """
    if not node_leaders(info):
        return
    rank, error = dist.get_rank(), ""
    for sender, node in enumerate(info.separate_nodes):
        if node and rank in (0, sender):
            for name in names[sender]:
                failure = _transfer(folder / name, sender, [0], info)
                error = error or failure
    _raise_everywhere(error, info)
    if rank in node_leaders(info):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def on_every_node(folder: Path, info: RankInfo) -> Generator[Path]:
    """Yield a folder with the files of rank 0's ``folder``; on nodes that do not share it, a copy. Collective.

    Raises ``CheckpointError`` on every rank if a file cannot be read or written. If any node needs a copy, all ranks wait
    for each other at the end of the block, so an error within the block must be raised on every rank.
    """
    leaders = node_leaders(info)
    if not leaders:
        yield folder
        return
    rank = dist.get_rank()
    copy = folder.parent / COPY
    target = copy / folder.name if info.separate_nodes[rank] else folder
    names: list[list[str]] = [[]]
    if rank == 0 and os.path.isdir(folder):  # a missing or unreachable folder is reported by the reader
        names = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())]
    dist.broadcast_object_list(names)
    error = ""
    if rank in leaders:
        shutil.rmtree(copy, ignore_errors=True)
    try:
        for name in names[0] if rank in (0, *leaders) else ():
            failure = _transfer(target / name, 0, leaders, info)
            error = error or failure
        _raise_everywhere(error, info)
        yield target
        dist.barrier()  # all ranks of a node have read its copy
    finally:
        if rank in leaders:
            shutil.rmtree(copy, ignore_errors=True)


def _raise_everywhere(error: str, info: RankInfo) -> None:
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    texts = [
        f"rank {rank} on {info.separate_nodes[rank] or 'the node of rank 0'}: {text}"
        for rank, text in enumerate(errors)
        if text
    ]
    if texts:
        raise CheckpointError("; ".join(texts))


def _transfer(path: Path, sender: int, receivers: Sequence[int], info: RankInfo) -> str:
    """Send or receive a file. Return this rank's error message, or "". After an error, all chunks are still exchanged."""
    if dist.get_rank() == sender:
        return _send(path, receivers, info.device)
    return _receive(path, sender, info.device)


def _send(path: Path, receivers: Sequence[int], device: torch.device) -> str:
    with contextlib.ExitStack() as stack:
        error, size, file = "", 0, None
        try:
            file = stack.enter_context(path.open("rb"))
            size = path.stat().st_size
        except OSError as failure:
            error = f"{path}: {failure.strerror}"
        for receiver in receivers:
            dist.send(torch.tensor([size], dtype=torch.int64, device=device), receiver)
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.zeros(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
            try:
                assert file is not None, "a file of size 0 has no chunk"
                if not error and (num_read := _read_into(file, chunk)) < len(chunk):
                    error = f"{path}: {size - begin - num_read} of {size} bytes are missing"
            except OSError as failure:
                error = f"{path}: {failure.strerror}"
            for receiver in receivers:
                dist.send(chunk.to(device), receiver)
    return error


def _read_into(file: BinaryIO, chunk: torch.Tensor) -> int:
    """Fill a chunk; return the number of bytes read, which is below the chunk's size if the file ends."""
    view, num_read = memoryview(chunk.numpy()), 0
    while num_read < len(view) and (data := file.read(len(view) - num_read)):
        view[num_read : num_read + len(data)] = data
        num_read += len(data)
    return num_read


def _receive(path: Path, sender: int, device: torch.device) -> str:
    size_tensor = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size_tensor, sender)
    size, error = int(size_tensor.item()), ""
    with contextlib.ExitStack() as stack:
        file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("wb"))
        except OSError as failure:
            error = f"{path}: {failure.strerror}"
        for begin in range(0, size, CHUNK_BYTES):
            chunk = torch.empty(min(CHUNK_BYTES, size - begin), dtype=torch.uint8, device=device)
            dist.recv(chunk, sender)
            try:
                if file is not None and not error:
                    file.write(memoryview(chunk.cpu().numpy()))
            except OSError as failure:
                error = f"{path}: {failure.strerror}"
        try:
            if file is not None:
                file.close()  # writes the rest of the file from its buffer
        except OSError as failure:
            error = error or f"{path}: {failure.strerror}"
    return error
