"""Workers in a thread of the test, clients of them, and the expert maths in float64."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.errors import SlimeLikeError
from slime_like_plugins.remote_experts.client import ClientSettings, WorkerClient
from slime_like_plugins.remote_experts.connection import Connection
from slime_like_plugins.remote_experts.serving import WorkerSettings
from slime_like_plugins.remote_experts.shapes import ExpertShapes
from slime_like_plugins.remote_experts.worker import serve

SHAPES = ExpertShapes((0, 3), (3, 2), 16, 24, "float32", 64, 2)


def weights_of(shapes: ExpertShapes, seed: int = 0) -> dict[int, dict[str, Tensor]]:
    """Return random matrices of each layer."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "w13": (2 * shapes.intermediate, shapes.hidden),
        "w2": (shapes.hidden, shapes.intermediate),
    }
    return {
        layer: {
            name: (torch.randn((count, *size), generator=generator) / 4).to(shapes.torch_dtype)
            for name, size in sizes.items()
        }
        for layer, count in zip(shapes.layers, shapes.num_experts, strict=True)
    }


def write_all(client: WorkerClient, matrices: dict[int, dict[str, Tensor]]) -> None:
    """Send every matrix of every expert."""
    for layer, by_name in matrices.items():
        for name, matrix in by_name.items():
            for expert, rows in enumerate(matrix):
                client.write(layer, name, expert, 0, rows)


def requests(shapes: ExpertShapes, layer: int, num_rows: int, num_selected: int, seed: int = 1) -> tuple[Any, Any, Any]:
    """Return rows, ids and weights of a request."""
    rng = np.random.default_rng(seed)
    count = dict(zip(shapes.layers, shapes.num_experts, strict=True))[layer]
    rows = torch.from_numpy(rng.standard_normal((num_rows, shapes.hidden)).astype(np.float32))
    ids = np.stack([rng.permutation(count)[:num_selected] for _ in range(num_rows)]).astype(np.int32)
    return rows, ids, rng.random((num_rows, num_selected)).astype(np.float32)


def reference(rows: Tensor, ids: Any, weights: Any, matrices: dict[str, Tensor]) -> Tensor:
    """Return the sums in float64, one token and expert at a time. An id of -1 stands for no expert."""
    out = torch.zeros((len(rows), rows.shape[1]), dtype=torch.float64)
    for token, (selected, scales) in enumerate(zip(ids, weights, strict=True)):
        for expert, scale in zip(selected, scales, strict=True):
            if expert < 0:
                continue
            gate, up = (matrices["w13"][int(expert)].double() @ rows[token].double()).chunk(2)
            out[token] += float(scale) * (matrices["w2"][int(expert)].double() @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def private_key(folder: Path) -> Path:
    """Return the path of a key that only this user can read."""
    path = folder / "key"
    path.touch(0o600)
    path.write_text("0123456789abcdef0123")
    return path


def accept_all(listener: socket.socket, secret: bytes) -> None:
    """Serve the connections of a listener in turn until it is shut down."""
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            with contextlib.suppress(SlimeLikeError):
                serve(sock, WorkerSettings(), secret)


@contextlib.contextmanager
def in_thread(run: Callable[[socket.socket], None]) -> Generator[socket.socket]:
    """Yield the other end of a socket that ``run`` serves in a thread, which has to end when the socket is closed."""
    ours, theirs = socket.socketpair()

    def serve_quietly() -> None:
        with contextlib.suppress(SlimeLikeError, OSError), theirs:
            run(theirs)

    thread = threading.Thread(target=serve_quietly, daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def running(
    settings: ClientSettings, shapes: ExpertShapes = SHAPES, worker: Callable[[socket.socket], None] | None = None
) -> Generator[WorkerClient]:
    """Yield a client that has opened a worker in a thread."""
    with in_thread(worker or (lambda sock: serve(sock, WorkerSettings()))) as sock:
        client = WorkerClient(Connection(sock, settings.name, shapes.max_payload), settings)
        try:
            client.open(shapes)
            yield client
        finally:
            client.close()
