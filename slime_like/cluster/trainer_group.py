"""All trainer ranks as one Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slime_like.batch import Rows, TrainBatch
from slime_like.cluster.trainer_worker import EngineAddress
from slime_like.cluster.wait import wait_all
from slime_like.config.resolved import ActorSpec, TransportSpec
from slime_like.deadline import Deadline
from slime_like.errors import WorkerError
from slime_like.interfaces import TensorMeta
from slime_like.types import F32, StepStats


class TrainerGroup:
    """Calls every rank at once and hands back what the reporter says."""

    def __init__(self, workers: Sequence[Any], spec: ActorSpec, local_ranks: Sequence[int]) -> None:
        self._workers = {f"trainer rank {rank}": worker for rank, worker in enumerate(workers)}
        self._spec = spec
        self._local_ranks = local_ranks
        self._dp_ranks: dict[str, int] = {}
        self.version = 0

    def connect(self, waiting: Callable[[str], None] | None = None) -> None:
        """Join the ranks and build the model on each; ``waiting`` as in ``wait_all``."""
        deadline = self._deadline("connect")
        first = next(iter(self._workers.values()))
        master = wait_all({"trainer rank 0": first.rendezvous.remote()}, deadline, waiting)["trainer rank 0"]
        refs = {
            name: worker.connect.remote(self._spec, master, local_rank)
            for (name, worker), local_rank in zip(self._workers.items(), self._local_ranks, strict=True)
        }
        self._dp_ranks = wait_all(refs, deadline, waiting)

    def step(self, batch: TrainBatch) -> StepStats:
        """Ship each dp shard once, take every optimizer step, return the reporter's metrics."""
        shards = [ray.put([step.rows[dp] for step in batch.steps]) for dp in range(self._spec.layout.dp)]
        tokens = [step.num_tokens for step in batch.steps]
        refs = {
            name: worker.step.remote(shards[self._dp_ranks[name]], tokens) for name, worker in self._workers.items()
        }
        results = wait_all(refs, self._deadline("step"))
        self.version += 1
        return StepStats(self.version, tuple(metric for metrics in results.values() for metric in metrics))

    def score(self, rows: Rows) -> F32:
        """[T] log-probabilities at the sampling temperature."""
        shared = ray.put(rows)
        scored = [x for x in self._on_all("score", shared).values() if x is not None]
        if len(scored) != 1:
            raise WorkerError(f"{len(scored)} trainer ranks reported log-probabilities, one should")
        return np.asarray(scored[0], dtype=np.float32)

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Copy everything on the ranks and let them write it to ``folder/iter_<iteration>``."""
        self._on_all("begin_save", str(folder), iteration)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether what was begun is whole; without ``wait`` only if no rank still writes."""
        return all(self._on_all("finish_save", wait).values())

    def load(self, folder: Path, iteration: int) -> None:
        """Read ``folder/iter_<iteration>``."""
        versions = set(self._on_all("load", str(folder), iteration).values())
        if len(versions) != 1:
            raise WorkerError(
                f"trainer ranks read different versions from {folder}: {sorted(versions)}; is the folder shared by all nodes?"
            )
        self.version = int(versions.pop())

    def export_hf(self, folder: Path) -> None:
        """Write the weights in HF format."""
        self._on_all("export_hf", str(folder))

    def manifests(self) -> list[tuple[TensorMeta, ...]]:
        """What each sender will send in a push."""
        return [manifest for manifest in self._on_all("manifest").values() if manifest]

    def push(self, engines: Sequence[EngineAddress], transport: TransportSpec) -> list[TensorMeta]:
        """Send all weights; returns every tensor sent."""
        sent = self._on_all("push", list(engines), transport, seconds=transport.deadline_s)
        return [meta for metas in sent.values() for meta in metas]

    def _on_all(self, verb: str, *args: Any, seconds: float | None = None) -> dict[str, Any]:
        refs = {name: getattr(worker, verb).remote(*args) for name, worker in self._workers.items()}
        return wait_all(refs, self._deadline(verb, seconds))

    def _deadline(self, phase: str, seconds: float | None = None) -> Deadline:
        return Deadline("driver", phase, seconds or self._spec.deadline_s)
