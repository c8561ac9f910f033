"""Link of an engine's rank to its worker: the worker's process or address, its client, and reopening after a failure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.remote_experts.client import FAILURES, ClientSettings, WorkerClient
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.frames import RowType
from slime_like_plugins.remote_experts.process import ExpertProcess, WorkerOrigin, connect
from slime_like_plugins.remote_experts.shapes import WRITE_BYTES, ExpertShapes

START_S = 120.0

type LayerMatrices = Mapping[int, Mapping[str, Tensor]]
"""Layer -> w13 [R, 2I, H] and w2 [R, H, I] of its remote experts."""


class WorkerLink:
    """Connection of one rank to its worker; it can be opened again after a failure."""

    def __init__(self, options: RemoteOptions, rank: int) -> None:
        self._options, self._rank = options, rank
        self._process: ExpertProcess | None = None
        self._client: WorkerClient | None = None
        self._absence = "has not been connected"  # why there is no client

    @property
    def name(self) -> str:
        """Name of the worker in error messages."""
        address = self._address()
        place = f"at {address}" if address else f"(pid {self._process.pid})" if self._process else "(not started)"
        return f"the worker of remote experts of rank {self._rank} {place}"

    @property
    def client(self) -> WorkerClient:
        """Client of the open worker. Raises ``PeerLost`` with the reason if none is open."""
        if self._client is None:
            raise PeerLost(f"{self.name} {self._absence}")
        return self._client

    @property
    def is_open(self) -> bool:
        """True after ``open``, until ``close`` or ``abandon``."""
        return self._client is not None

    def start(self) -> None:
        """Start the worker's process, unless it has been started or the option ``workers`` gives the worker's address.

        The process imports torch while the engine builds its model.
        """
        if not self._address() and self._process is None:
            o = self._options
            self._process = ExpertProcess(WorkerOrigin(threads=o.threads, device=o.device))

    def open(self, shapes: ExpertShapes, connect_s: float = START_S) -> WorkerClient:
        """Start the worker if necessary, connect, and make it allocate its experts.

        Raises one of ``FAILURES`` if the worker fails, ``ConfigError`` if the settings cannot be used. If another
        program starts workers, ``connect_s`` is the time limit in seconds until the worker has accepted the connection.
        """
        self.start()
        o = self._options
        settings = ClientSettings(self.name, o.transport, RowType[o.payload_dtype], o.deadline_s, o.shared_bytes)
        if self._process is not None:
            connection = Connection(self._process.socket, self.name, WRITE_BYTES)
        else:
            origin = WorkerOrigin(self._address(), Path(o.key_file))
            connection = connect(origin, self.name, connect_s)
        client = WorkerClient(connection, settings)
        try:
            client.open(shapes, START_S)
        except (*FAILURES, ConfigError):
            client.close()
            raise
        self._client = client
        return client

    def send(self, matrices: LayerMatrices) -> None:
        """Send every row of ``matrices``. Raises one of ``FAILURES`` if the worker fails or is not open."""
        for layer, by_name in matrices.items():
            for name, matrix in by_name.items():
                for expert, rows in enumerate(matrix):
                    self.client.write(layer, name, expert, 0, rows)

    def close(self) -> None:
        """Close the connection, and end the process if this rank started it. It returns even if the worker hangs. Idempotent."""
        self._absence = "has been closed"
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.stop()
            self._process = None

    def abandon(self) -> None:
        """Drop the connection to a failed worker, and kill its process if this rank started it."""
        self._absence = "has failed before"
        if self._process is not None:
            self._process.kill()
        if self._client is not None:
            self._client.drop()
            self._client = None
        self._process = None

    def _address(self) -> str:
        return self._options.workers[self._rank] if self._options.workers else ""
