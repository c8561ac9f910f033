"""All trainer ranks as one ``Trainer``, and the base class of rank groups, whose ranks are called concurrently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate

import numpy as np
from ray import ObjectRef
from ray.actor import ActorHandle

from slime_like.batch import Columns, PackedBatch, Shard, TrainBatch, shards
from slime_like.cluster.workers.calls import call, put, wait_all
from slime_like.cluster.workers.trainer_worker import RankWorker, TrainerWorker
from slime_like.config.schema.resolved import RankSpec, TransportSpec
from slime_like.data.routing import RoutingDifference
from slime_like.errors import WorkerError
from slime_like.interfaces import EngineAddress, TensorMeta
from slime_like.metrics.types import Metric
from slime_like.types import F32, StepStats
from slime_like.util.deadline import Deadline

# Time limit for releasing communicators, in multiples of a collective's deadline. A release is one collective.
RELEASE_DEADLINES = 2
type Refs[R] = dict[str, ObjectRef[R]]  # pending result by rank name


class RankGroup[W: RankWorker](ABC):
    """The workers of one role. ``start`` calls them; ``wait_all`` collects the results of one or several roles."""

    def __init__(self, role: str, workers: Sequence[ActorHandle[W]], rank: RankSpec) -> None:
        self.role = role
        self._workers = {f"{role} rank {rank}": worker for rank, worker in enumerate(workers)}
        self._deadline_s = rank.deadline_s
        self._releases = rank.guard.release
        # Only the driver notices a rank that stops outside a collective; inside one, its peers should report first.
        self._release_s = min(rank.deadline_s, RELEASE_DEADLINES * rank.guard.deadline_s)
        self._dp_ranks: dict[str, int] = {}

    def rendezvous(self) -> Refs[tuple[str, int]]:
        """Request the rendezvous address from rank 0."""
        name, first = next(iter(self._workers.items()))
        return {name: call(first, RankWorker.rendezvous)}

    @abstractmethod
    def start_connect(self, master: tuple[str, int]) -> Refs[int]:
        """Start joining the ranks and building the model on each; the caller passes the results to ``set_dp_ranks``."""

    def set_dp_ranks(self, dp_ranks: Mapping[str, int]) -> None:
        """Store the data-parallel rank of each worker."""
        self._dp_ranks = {name: dp_ranks[name] for name in self._workers}

    def start[**P, R](self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> Refs[R]:
        """Start the same call on every rank; return the pending results by rank name."""
        return {name: call(worker, method, *args, **kwargs) for name, worker in self._workers.items()}

    def start_sharded[S, **P, R](
        self, method: Callable[Concatenate[W, S, P], R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> Refs[R]:
        """Start a call on every rank with the shard of its data-parallel rank; return the pending results by rank name."""
        return {
            name: call(worker, method, shards[self._dp_ranks[name]], *args, **kwargs)
            for name, worker in self._workers.items()
        }

    def on_all[**P, R](self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs) -> dict[str, R]:
        """Make the same call on every rank and return the results by rank name."""
        return wait_all(self.start(method, *args, **kwargs), self.deadline(method.__name__))

    def release_communicators(self) -> None:
        """Release the ranks' communicators until the next phase with collectives, if ``guard.release`` is set. Idempotent."""
        if self._releases:
            wait_all(self.start(RankWorker.release_communicators), self.deadline("release", self._release_s))

    def keep_on_device(self, parts: Sequence[str]) -> None:
        """Keep only ``parts`` (``config.schema.residency``) of every rank's state on its device."""
        wait_all(self.start(RankWorker.keep_on_device, tuple(parts)), self.deadline("offload"))

    def by_shard[R](self, answers: Mapping[str, R | None]) -> list[R]:
        """Return one result per data-parallel shard, from the rank that reports it; the answers of other ranks are None."""
        results = {self._dp_ranks[name]: x for name in self._workers if (x := answers[name]) is not None}
        assert len(results) == len(set(self._dp_ranks.values())), f"{self.role}: shards {sorted(results)} answered"
        return [results[rank] for rank in sorted(results)]

    def deadline(self, phase: str, seconds: float | None = None) -> Deadline:
        """Return a deadline of ``seconds``, by default the role's ``deadline_s``, for the driver's wait in ``phase``."""
        return Deadline("driver", phase, seconds or self._deadline_s)


def connect(groups: Sequence[RankGroup[Any]], deadline: Deadline, waiting: Callable[[str], None] | None = None) -> None:
    """Join the ranks of each group into a world of their own and build their models, all groups concurrently.

    ``waiting``: see ``wait_all``.
    """
    addresses: Refs[tuple[str, int]] = {}
    for group in groups:
        addresses |= group.rendezvous()
    masters = list(wait_all(addresses, deadline, waiting).values())
    refs: Refs[int] = {}
    for group, master in zip(groups, masters, strict=True):
        refs |= group.start_connect(master)
    dp_ranks = wait_all(refs, deadline, waiting)
    for group in groups:
        group.set_dp_ranks(dp_ranks)


class TrainerGroup(RankGroup[TrainerWorker]):
    """All actor ranks. The methods of ``Trainer`` call the ranks concurrently and combine their results."""

    def __init__(self, workers: Sequence[ActorHandle[TrainerWorker]], spec: RankSpec) -> None:
        super().__init__("trainer", workers, spec)
        self._spec = spec
        self.version = 0

    def start_connect(self, master: tuple[str, int]) -> Refs[int]:
        """Start joining the ranks and building the model on each."""
        return self.start(TrainerWorker.connect, self._spec, master)

    def step(self, batch: TrainBatch) -> StepStats:
        """Ship each data-parallel shard once, take every optimizer step, and return the metrics of all ranks."""
        tokens = [step.num_tokens for step in batch.steps]
        results = wait_all(
            self.start_sharded(TrainerWorker.train_rollout, self._ship(batch), tokens), self.deadline("step")
        )
        self.version += 1
        return StepStats(self.version, tuple(metric for metrics in results.values() for metric in metrics))

    def _ship(self, batch: TrainBatch) -> list[Shard]:
        return [put(shard) for shard in shards(batch, self._spec.layout.dp)]

    def start_open(self, batch: TrainBatch) -> Refs[None]:
        """Start the score part of a step with several roles (``MultiRoleTrainer``): ship each shard once and score it."""
        return self.start_sharded(TrainerWorker.open_rollout, self._ship(batch))

    def start_advantages(self, columns: Sequence[Mapping[str, Columns]]) -> Refs[Columns | None]:
        """Start the advantages part of a step with several roles: compute advantages from the other roles' ``columns``.

        The results are the critic's targets, and None for ranks that do not report a shard, or if there is no critic.
        """
        return self.start_sharded(TrainerWorker.compute_advantages, [put(column) for column in columns])

    def start_update(self, batch: TrainBatch, *, frozen: bool) -> Refs[tuple[Metric, ...]]:
        """Start the update part of a step with several roles: the optimizer steps, none if ``frozen``."""
        return self.start(TrainerWorker.update, [step.num_tokens for step in batch.steps], frozen)

    def score(self, batch: PackedBatch, float64_kind: str | None = None) -> F32:
        """Return [T] log-probabilities at the sampling temperature.

        Layers of kind ``float64_kind``, if not None, are computed in float64. Raises ``WorkerError`` unless exactly one
        rank reports log-probabilities.
        """
        score_results = [
            x for x in self.on_all(TrainerWorker.score, put(batch), float64_kind).values() if x is not None
        ]
        if len(score_results) != 1:
            raise WorkerError(f"{len(score_results)} trainer ranks reported log-probabilities instead of one")
        return np.asarray(score_results[0], dtype=np.float32)

    def routing_difference(self) -> RoutingDifference:
        """Return how the replayed experts differ from the trainer's own choice.

        The result covers the batches scored since the last call or the last update of the weights.
        """
        (difference,) = (x for x in self.on_all(TrainerWorker.routing_difference).values() if x is not None)
        return difference

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return a dict from sample id to the advantages [L] that the ranks computed in the last rollout that was not empty.

        Samples that are not of that rollout are missing. ``Trainer.token_advantages`` says when the dict is empty.
        """
        answers = self.on_all(TrainerWorker.token_advantages, put(list(sample_ids))).values()
        return {sample_id: column for columns in answers for sample_id, column in columns.items()}

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers of the model that ``score`` can compute in float64."""
        return tuple(sorted({kind for kinds in self.on_all(TrainerWorker.layer_kinds).values() for kind in kinds}))

    def kernels(self) -> tuple[str, ...]:
        """Return descriptions of the kernels that layers with several implementations have used, on all ranks."""
        return tuple(
            sorted({description for rank in self.on_all(TrainerWorker.kernels).values() for description in rank})
        )

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Snapshot the state of all ranks and begin to write it to ``folder/iter_<iteration>``."""
        self.on_all(TrainerWorker.begin_save, str(folder), iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the save is complete; with ``wait``, block until it is."""
        return all(self.on_all(TrainerWorker.finish_save, wait).values())

    def load(self, folder: Path, iteration: int) -> None:
        """Load ``folder/iter_<iteration>``. Raises ``WorkerError`` if the ranks read different weight versions."""
        versions = set(self.on_all(TrainerWorker.load, str(folder), iteration).values())
        if len(versions) != 1:
            raise WorkerError(
                f"trainer ranks read different versions from {folder}: {sorted(versions)}; is the folder shared by all nodes?"
            )
        self.version = versions.pop()

    def export_hf(self, folder: Path) -> None:
        """Write the weights in HF format."""
        self.on_all(TrainerWorker.export_hf, str(folder))

    def manifests(self) -> list[tuple[TensorMeta, ...]]:
        """Return the metadata of the tensors in a push, in one tuple for each pipeline stage."""
        return [manifest for manifest in self.on_all(TrainerWorker.manifest).values() if manifest]

    def send_weights(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> list[TensorMeta]:
        """Send all weights and return the metadata of the sent tensors."""
        engines_ref = put(tuple(engines))  # once: pickled for each rank, the addresses would cost ranks x engines
        refs = self.start(TrainerWorker.send_weights, engines_ref, transport)
        tensors_by_rank = wait_all(refs, self.deadline("push", transport.deadline_s))
        return [meta for metas in tensors_by_rank.values() for meta in metas]
