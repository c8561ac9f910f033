"""One trainer rank as a Ray actor, with the weight sender. torch is first imported in ``connect``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.util import get_node_ip_address

from slime_like.batch import Columns, PackedBatch
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.cluster.workers.peaks import MemoryPeaks
from slime_like.config.schema.names import COLOCATED_TRANSPORTS, SPLIT_TRANSPORTS
from slime_like.config.schema.residency import COLLECT
from slime_like.config.schema.resolved import RankSpec, TransportSpec
from slime_like.data.routing import RoutingDifference
from slime_like.errors import SlimeLikeError
from slime_like.interfaces import EngineAddress, TensorMeta, WeightReceiver, WeightSender, WeightSource
from slime_like.metrics.types import Metric
from slime_like.registry import resolve
from slime_like.types import F32
from slime_like.util.caches import keep_caches_private
from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports
from slime_like.util.ports import RendezvousAddress, open_rendezvous

if TYPE_CHECKING:
    from slime_like.train.megatron.rank.residency import DeviceState
    from slime_like.train.megatron.rank.trainer import RankTrainer

APPEAR_S = 5.0  # for a new file to appear on another node of a shared file system
POLL_S = 0.2


class RankWorker:
    """Base of the Ray actors that hold Megatron ranks."""

    def __init__(self, name: str, rank: int, world_size: int, stacks_dir: str, env: Mapping[str, str]) -> None:
        """Set the environment variables ``env``, which torch reads at import, and prepare stack dumps in ``stacks_dir``.

        Raises the errors of ``keep_caches_private``.
        """
        os.environ.update(env)
        keep_caches_private()
        dump_stacks_on_signal(Path(stacks_dir), f"{name}_rank{rank}")
        self._rank = rank
        self._world_size = world_size
        self._rendezvous: RendezvousAddress | None = None
        self.separate_nodes: tuple[str, ...] = ()

    def set_separate_nodes(self, addresses: tuple[str, ...]) -> None:
        """Store the value of ``RankInfo.separate_nodes``. Call this before ``connect``."""
        self.separate_nodes = addresses

    def rendezvous(self) -> tuple[str, int]:
        """Listen on a free port of this node's address only; return the address and the port. Only rank 0 does this."""
        self._rendezvous = open_rendezvous(_own_address())
        return self._rendezvous.host, self._rendezvous.port

    def node_without_file(self, path: str) -> str:
        """Return the address of this node if ``path`` does not appear on it within ``APPEAR_S``; empty if it does."""
        deadline = Deadline("trainer", "connect", APPEAR_S)
        while not Path(path).exists():
            if deadline.elapsed() > deadline.limit:
                return _own_address()
            time.sleep(POLL_S)
        return ""

    def missing_paths(self, paths: Sequence[str]) -> dict[str, str]:
        """Return those of ``paths`` that do not exist on this node, each with the node's address."""
        return {path: _own_address() for path in paths if not os.path.exists(path)}

    def rendezvous_address(self, master: tuple[str, int]) -> RendezvousAddress:
        """Return the address of the rendezvous at ``master``; on rank 0, it contains the open socket."""
        return self._rendezvous or RendezvousAddress(*master)

    def release_communicators(self) -> None:
        """Destroy communicators if ``guard.release`` is set; the next phase with collectives creates them again.

        A collective over the role's ranks.
        """
        from slime_like.distributed.wrapper import install

        install.release()

    def keep_on_device(self, parts: Sequence[str]) -> None:
        """Keep only ``parts`` (``config.schema.residency``) of this rank's state on its device.

        The other parts move to host memory, except gradients, which are not preserved.
        """
        self.device_state.keep(parts)

    @property
    def device_state(self) -> DeviceState:
        """Return the state that the connected rank can keep on its device.

        Raises ``NotImplementedError`` unless a subclass overrides it.
        """
        raise NotImplementedError


class TrainerWorker(RankWorker):
    """Ray actor with one rank of the policy. ``TrainerGroup`` combines the results of the ranks.

    Methods that compute, save, load or push are collectives: the driver calls them on all ranks concurrently. No method
    is a coroutine: Ray would run all methods in an event loop, and collectives of two calls could interleave.
    """

    def __init__(self, rank: int, world_size: int, stacks_dir: str, env: Mapping[str, str]) -> None:
        super().__init__("trainer", rank, world_size, stacks_dir, env)
        self._trainer: RankTrainer | None = None
        self._sender = RankSender(rank)
        self._peaks = MemoryPeaks(cuda=False)
        self._events = asyncio.new_event_loop()

    def connect(self, spec: RankSpec, master: tuple[str, int]) -> int:
        """Join the other ranks and build the model; return the data-parallel rank. A collective over all ranks."""
        self._peaks = MemoryPeaks(cuda=spec.device == "cuda")
        with heavy_imports():
            from slime_like.train.megatron.platform import groups

            rank_info = groups.join_and_make_groups(
                spec, rank=self._rank, world_size=self._world_size, master=self.rendezvous_address(master)
            )
            from slime_like.train.megatron.rank.trainer import RankTrainer  # needs ``join_and_make_groups``

            self._trainer = RankTrainer(spec, replace(rank_info, separate_nodes=self.separate_nodes))
        return rank_info.dp_rank

    @property
    def trainer(self) -> RankTrainer:
        """Return the connected rank."""
        assert self._trainer is not None, "connect comes first"
        return self._trainer

    @property
    def device_state(self) -> DeviceState:
        """Return the state that the connected rank can keep on its device."""
        return self.trainer.device_state

    def keep_on_device(self, parts: Sequence[str]) -> None:
        """Keep only ``parts`` on the device. If ``parts`` is empty, record the remaining memory as the peak of phase collect."""
        super().keep_on_device(parts)
        if not parts:
            with self._peaks(COLLECT):
                pass

    def train_rollout(self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Train on this rank's batches of every optimizer step of a rollout; return metrics."""
        with self._peaks("step"):
            metrics = self.trainer.train_rollout(steps, num_tokens)
        return self._with_peaks(metrics)

    def _with_peaks(self, metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
        """Return ``metrics`` and, on the reporter (the rank that reports global metrics), memory peaks since the last call."""
        return (*metrics, *self._peaks.drain()) if self.trainer.rank_info.is_reporter else metrics

    def open_rollout(self, steps: Sequence[Sequence[PackedBatch]]) -> None:
        """Run the first part of ``train_rollout``: score the batches with the policies that the algorithm needs."""
        with self._peaks("score"):
            self.trainer.open_rollout(steps)

    def compute_advantages(self, columns: Mapping[str, Columns]) -> Columns | None:
        """Run the second part of ``train_rollout``: compute advantages from scores and the ``columns`` of other roles.

        Return the critic's targets on the rank that reports its shard; None on other ranks, or if there is no critic.
        """
        return self.trainer.compute_advantages(columns)

    def update(self, num_tokens: Sequence[int], frozen: bool) -> tuple[Metric, ...]:
        """Run the last part of ``train_rollout``: take the rollout's optimizer steps, none if ``frozen``; return metrics."""
        with self._peaks("step"):
            metrics = self.trainer.update(num_tokens, frozen=frozen)
        return self._with_peaks(metrics)

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return a dict from sample id to advantages [L] for the ``sample_ids`` of the last rollout that was not empty.

        The dict contains only samples that this rank reports.
        """
        return self.trainer.token_advantages(sample_ids)

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32 | None:
        """Return log-probabilities [T] on the rank that reports global metrics; None on the others.

        Layers of kind ``float64_kind``, if not None, are computed in float64.
        """
        with self._peaks("score"):
            return self.trainer.score(batch, float64_kind)

    def routing_difference(self) -> RoutingDifference | None:
        """Compare the replayed experts with this model's own choices since the last call or the last update of the weights.

        The result is None except on the rank that reports global metrics.
        """
        return self.trainer.routing_difference()

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers on this rank that ``score`` can compute in float64."""
        return self.trainer.layer_kinds()

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that this rank's layers with several implementations have used."""
        return self.trainer.kernels()

    def begin_save(self, folder: str, iteration: int) -> None:
        """Begin to write this rank's part of a checkpoint."""
        with self._peaks("save"):
            self.trainer.begin_save(Path(folder), iteration)

    def finish_save(self, wait: bool) -> bool:
        """Complete any pending checkpoint and return True; without ``wait``, return False if a rank is still writing."""
        return self.trainer.finish_save(wait=wait)

    def load(self, folder: str, iteration: int) -> int:
        """Load this rank's part of a checkpoint; return the version of the loaded weights."""
        self.trainer.load(Path(folder), iteration)
        return self.trainer.version

    def export_hf(self, folder: str) -> None:
        """Write the actor's weights to ``folder`` in HF format, together with the other ranks."""
        self.trainer.export_hf(Path(folder))

    def manifest(self) -> tuple[TensorMeta, ...]:
        """Return the metadata of the pipeline stage's tensors if this rank is the stage's sender (``is_sender``), else ()."""
        source = self.trainer.hf_export
        return source.manifest() if source.is_sender else ()

    def send_weights(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> list[TensorMeta]:
        """Send the weights to every engine. A collective over all ranks.

        The sender of each pipeline stage (``is_sender``) returns the metadata of the stage's tensors; other ranks return [].
        """
        from slime_like.distributed.wrapper import install

        with install.phase("push"), self._peaks("push"):
            sending = self._sender.send(self.trainer.hf_export, tuple(engines), transport)
            return self._events.run_until_complete(sending)


class RankSender:
    """Weight sender of one rank. It is separate from ``TrainerWorker``, which must not have coroutines."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sender: WeightSender | None = None
        self._engines: tuple[EngineAddress, ...] = ()  # engines that _sender is connected to
        self._num_groups = 0

    async def send(
        self, source: WeightSource, engines: tuple[EngineAddress, ...], transport: TransportSpec
    ) -> list[TensorMeta]:
        """Send all weights of ``source`` to ``engines``. A collective over all ranks.

        The sender of each pipeline stage (``is_sender``) returns the metadata of the stage's tensors; other ranks return [].
        ``weights.transport=ipc`` also sends from other ranks. The connections are reused only for the same engines; a
        restarted engine has a new address. If the push fails with a ``SlimeLikeError``, the connections are closed before it
        is raised.
        """
        if self._sender is not None and self._engines != engines:
            await self._drop()
        if self._sender is None:
            self._sender, self._engines = self._connect(engines, transport), engines
        try:
            return await self._sender.send(source)
        except SlimeLikeError:
            await self._drop()
            raise

    async def _drop(self) -> None:
        """Close the sender and its process groups, in which engines may be waiting."""
        sender, self._sender = self._sender, None
        assert sender is not None
        await sender.close()

    def _connect(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> WeightSender:
        from slime_like.rollout.engine.client import EngineClient

        clients = [
            EngineClient.at(address, deadline_s=transport.deadline_s, peer_timeout_s=transport.peer_timeout_s)
            for address in engines
        ]
        self._num_groups += 1
        return _make_sender(clients, transport, f"weights_rank{self._rank}_{self._num_groups}")


def _make_sender(clients: Sequence[WeightReceiver], transport: TransportSpec, group_name: str) -> WeightSender:
    factory: Any = resolve("weights.transport", transport.kind, COLOCATED_TRANSPORTS | SPLIT_TRANSPORTS)
    return factory(clients, transport=transport, group_name=group_name, host=_own_address())


def _own_address() -> str:
    """Return the loopback address if the run has started its own Ray, else the address at which other nodes reach this one."""
    return str(get_node_ip_address())
