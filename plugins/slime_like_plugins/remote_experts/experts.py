"""Remote experts of an engine's rank: weighted sums of their outputs, updates of their parameters, and failures of the worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like_plugins.remote_experts.client import FAILURES, Traffic
from slime_like_plugins.remote_experts.exchange import Exchange
from slime_like_plugins.remote_experts.flags import in_settings_of_user
from slime_like_plugins.remote_experts.link import WorkerLink
from slime_like_plugins.remote_experts.memory import ExpertMemory
from slime_like_plugins.remote_experts.mode import STREAM_ROWS, ModeChooser
from slime_like_plugins.remote_experts.routing import TokenBucket
from slime_like_plugins.remote_experts.shapes import ExpertShapes

logger = logging.getLogger(__name__)
MAX_RESTARTS = 3  # maximum number of new workers in a row that fail before they answer a request
RECONNECT_S = 30.0  # time for each new worker to accept the connection, if another program starts workers
REPLACED = "slime_like remote experts: %s; a new worker replaces it"
FIX = "see the worker's error above, or set rollout.remote_experts.policy=fallback or respawn"

type LocalSums = Callable[[Callable[[], None]], Tensor]
"""Function that computes the engine's own experts, and calls its argument between experts."""


class RemoteExpertsLost(SlimeLikeError, RuntimeError):
    """Failure of a worker from which ``rollout.remote_experts.policy`` does not recover."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of the worker for reports."""

    num_restarts: int
    is_replaced: bool  # True if the engine computes the worker's experts


class RemoteExperts:
    """Remote experts of all layers of one rank."""

    def __init__(self, options: RemoteOptions, rank: int) -> None:
        self._options = options
        self._link = WorkerLink(options, rank)
        self._shapes: ExpertShapes | None = None
        self._copy: ExpertMemory | None = None  # copy of the weights, for policies other than required
        self._version = 0  # committed; 0 while an update is open
        self._commits = 0
        self._is_replaced = False
        self._failure = ""  # reason why an update failed
        self._restarts = self._restarts_in_a_row = 0
        self._chooser = ModeChooser(options.mode)
        self._traffic = Traffic()

    # ---- start -------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the worker's process, unless another program starts workers."""
        self._link.start()

    def open(self, shapes: ExpertShapes) -> None:
        """Connect to the worker and make it allocate the experts.

        Raises one of ``FAILURES`` if the worker fails, ``ConfigError`` if the settings cannot be used.
        """
        self._shapes = shapes
        if self._options.policy != "required":
            self._copy = ExpertMemory(shapes, torch.device("cpu"))
        client = self._link.open(shapes)
        logger.info(
            "slime_like remote experts: %d experts in %d layers (%d bytes) in %s, %s mode, %s transport, policy %s",
            *(sum(shapes.num_experts), len(shapes.layers), shapes.weight_bytes, self._link.name),
            *(self._options.mode, client.transport, self._options.policy),
        )

    @property
    def is_open(self) -> bool:
        """True once ``open`` has been called."""
        return self._shapes is not None

    @property
    def traffic(self) -> Traffic:
        """Sum of the counters of all workers that this rank has had."""
        total = self._traffic
        return total.plus(self._link.client.traffic) if self._link.is_open else total

    @property
    def state(self) -> WorkerState:
        """State of the worker: number of restarts, and whether the engine computes the worker's experts itself."""
        return WorkerState(self._restarts, self._is_replaced)

    def close(self) -> None:
        """Close the connection, and end the worker if this rank started it. It returns even if the worker hangs."""
        self._link.close()

    # ---- weights -----------------------------------------------------------------------------------------------------
    # No method of an update raises an error of the worker: other ranks would wait for this one in SGLang's barriers.
    def begin(self) -> None:
        """Invalidate the weights. Every element must be written before the commit."""
        self._version, self._failure = 0, ""
        if self._copy is not None:
            self._copy.begin()
        self._try(lambda: self._link.client.begin())
        self._restore()

    def write(self, layer: int, name: str, expert: int, start: int, rows: Tensor) -> None:
        """Replace rows of a matrix of a remote expert."""
        if self._copy is not None:
            self._copy.rows(layer, name, expert, start, len(rows)).copy_(rows)
        self._try(lambda: self._link.client.write(layer, name, expert, start, rows))

    def unwritten(self) -> tuple[list[tuple[str, int, int]], str]:
        """Return the incomplete matrices (name, missing elements, elements), and the worker's failure or "".

        A failed worker is first replaced if the policy is ``respawn``.
        """
        report: list[tuple[str, int, int]] = []
        self._restore()
        self._try(lambda: report.extend(self._link.client.unwritten()))
        if self._failure and self._restore():
            self._try(lambda: report.extend(self._link.client.unwritten()))
        if self._is_replaced:  # the engine computes the experts since this update's failure, or since an earlier one
            assert self._copy is not None
            return self._copy.unwritten(), ""
        return report, self._failure

    def commit(self) -> str:
        """Serve the written weights as the next version. Return the worker's failure, or "" on success."""
        self._commits += 1
        if not self._is_replaced:
            self._try(lambda: self._link.client.commit(self._commits))
            if self._failure and self._restore():
                self._try(lambda: self._link.client.commit(self._commits))
        if not self._failure:
            self._version = self._commits
        return self._failure

    def _try(self, call: Callable[[], None]) -> None:
        """Run ``call``, which uses the worker. Do nothing if the worker has failed earlier in this update or is no longer used.

        If the call fails, abandon the worker. Under policy ``fallback``, the engine then computes the worker's experts itself;
        otherwise the failure is kept for ``_restore`` and for the end of the update.
        """
        if self._is_replaced or self._failure:
            return
        try:
            call()
        except (*FAILURES, RemoteExpertsLost) as error:
            self._keep_counters()
            self._link.abandon()
            if self._options.policy == "fallback":
                self._replace(error)
            else:
                self._failure = str(error)

    def _restore(self) -> bool:
        """Under policy ``respawn``, replace a failed worker by one with the weights written so far; return True on success."""
        if self._options.policy != "respawn" or not self._failure:
            return False
        logger.warning(REPLACED, self._failure)
        self._failure = ""
        self._try(self._respawn)
        return not self._failure

    # ---- sums --------------------------------------------------------------------------------------------------------
    def add_sums(self, layer: int, x_TH: Tensor, buckets: Sequence[TokenBucket], compute_local: LocalSums) -> Tensor:
        """Return the float32 sums [T, H] of local and remote experts.

        Each token's remote sum is a single term, which is added to its local sum, so the result does not depend on the order of
        replies. Raises ``RemoteExpertsLost`` if the worker fails under policy ``required``, or if no new worker can replace it
        under ``respawn``.
        """
        sums: Tensor | None = None
        while not self._is_replaced:
            start, waited = time.monotonic(), self._link.client.traffic.wait_s if self._link.is_open else 0.0
            try:
                if not self._link.is_open:
                    self._respawn()
                exchange = Exchange(self._link.client, layer, x_TH, buckets, self._max_rows())
                exchange.feed()
                if sums is None:
                    sums = compute_local(exchange.feed)
                answers = list(exchange.results())
            except FAILURES as error:
                self._fail(error)
                continue
            self._restarts_in_a_row = 0
            num_rows = sum(len(bucket.tokens) for bucket in buckets)
            wait_s = self._link.client.traffic.wait_s - waited
            self._chooser.record(num_rows, time.monotonic() - start, wait_s)
            return _added(sums, answers)
        if sums is None:
            sums = compute_local(lambda: None)
        return _added(sums, [(bucket, self._own_sums(layer, x_TH, bucket)) for bucket in buckets])

    def _max_rows(self) -> int:
        capacity = self._options.capacity
        return min(STREAM_ROWS, capacity) if self._chooser.next_mode == "stream" else capacity

    def _own_sums(self, layer: int, x_TH: Tensor, bucket: TokenBucket) -> Tensor:
        assert self._copy is not None
        return self._copy.sums(layer, bucket.rows_of(x_TH).to("cpu"), bucket.ids, bucket.weights)

    # ---- failures ----------------------------------------------------------------------------------------------------
    def _fail(self, error: Exception) -> None:
        """Apply the policy after a failed request.

        Raises ``RemoteExpertsLost`` under policy ``required``, and under ``respawn`` if ``MAX_RESTARTS`` new workers in a row
        have failed as well.
        """
        self._keep_counters()
        self._link.abandon()
        if self._options.policy == "fallback":
            self._replace(error)
            return
        self._restarts_in_a_row += 1
        if self._options.policy == "respawn" and self._restarts_in_a_row <= MAX_RESTARTS:
            logger.warning(REPLACED, error)
            return
        attempts = f" after {MAX_RESTARTS} new workers" if self._options.policy == "respawn" else ""
        raise RemoteExpertsLost(f"remote experts are lost{attempts}: {error}; {in_settings_of_user(FIX)}") from error

    def _replace(self, error: Exception) -> None:
        self._is_replaced = True
        logger.warning(
            "slime_like remote experts: %s; the engine computes its experts itself until it is restarted", error
        )

    def _respawn(self) -> None:
        """Open a new worker and send it this rank's copy of the weights. If these are committed, commit them in the worker too.

        Raises ``RemoteExpertsLost`` if this rank has no copy of the weights, or if the settings cannot be used for a new worker;
        one of ``FAILURES`` if that worker fails.
        """
        assert self._shapes is not None
        self._link.abandon()
        if self._copy is None:  # policy required, and the worker was lost in an update that SGLang failed too
            raise RemoteExpertsLost(f"remote experts were lost in a failed weight update; {in_settings_of_user(FIX)}")
        self._restarts += 1
        try:
            self._link.open(self._shapes, RECONNECT_S)
        except ConfigError as error:
            raise RemoteExpertsLost(f"remote experts are lost: {error}") from error
        self._link.send(self._copy.matrices)
        if self._version:
            self._link.client.commit(self._version)

    def _keep_counters(self) -> None:
        if self._link.is_open:
            self._traffic = self._traffic.plus(self._link.client.traffic)


def _added(sums: Tensor, answers: Sequence[tuple[TokenBucket, Tensor]]) -> Tensor:
    for bucket, rows in answers:
        index, rows = bucket.index(), rows.to(sums.device)
        if isinstance(index, slice):
            sums[index].add_(rows)
        else:
            sums.index_add_(0, index.to(sums.device), rows)
    return sums
