"""Requests of one layer to a worker, sent a few at a time while the engine computes its own experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from slime_like_plugins.remote_experts.client import ExpertRequest, WorkerClient
from slime_like_plugins.remote_experts.routing import TokenBucket


class Exchange:
    """Requests for the buckets of a batch."""

    def __init__(
        self, client: WorkerClient, layer: int, x_TH: Tensor, buckets: Sequence[TokenBucket], max_rows: int
    ) -> None:
        """Prepare the requests for ``buckets``, with at most ``max_rows`` rows each."""
        self._client, self._layer, self._x = client, layer, x_TH
        self._waiting: Iterator[TokenBucket] = (part for bucket in buckets for part in bucket.chunks(max_rows))
        self._next: TokenBucket | None = next(self._waiting, None)
        self._in_flight: deque[tuple[TokenBucket, ExpertRequest]] = deque()

    def feed(self) -> None:
        """Receive replies, and send requests while the client has room for them, without waiting.

        Do nothing once every request has been sent and ``results`` has at most one left to yield. Raises one of ``FAILURES`` if
        the worker fails.
        """
        if self._next is None and len(self._in_flight) < 2 and not self._client.is_sending:
            return  # the worker has at most one request, and receiving its reply now would not give it more work
        self._client.poll()
        while self._next is not None and self._client.has_room:
            bucket = self._next
            request = self._client.submit(self._layer, bucket.rows_of(self._x), bucket.ids, bucket.weights)
            self._in_flight.append((bucket, request))
            self._next = next(self._waiting, None)

    def results(self) -> Iterator[tuple[TokenBucket, Tensor]]:
        """Wait for the worker, and yield each request's tokens and their float32 sums, in the order of the requests.

        Raises one of ``FAILURES`` if the worker fails.
        """
        self.feed()
        while self._in_flight:
            bucket, request = self._in_flight.popleft()
            yield bucket, self._client.result(request)
            self.feed()
