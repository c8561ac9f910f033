"""One trainer rank: process group, model, optimizer, and the verbs of the trainer.

megatron is imported when a ``MegatronActor`` is made, after ``host.install``: importing this file costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.batch import Rows
from slime_like.checkpoint_files import latest_iteration, name_latest
from slime_like.config.resolved import ActorSpec
from slime_like.interfaces import WeightSource
from slime_like.metrics.types import Metric
from slime_like.train.megatron import groups, host
from slime_like.types import F32

if TYPE_CHECKING:
    from slime_like.train.megatron.checkpoint import PendingSave


class MegatronActor:
    """A rank of the trainer. Every rank calls the same methods in the same order; all are collective.

    ``version`` counts the rollouts trained on. Exactly one rank of the world ``is_reporter``: its metrics and scores
    are the ones that count.
    """

    def __init__(
        self, spec: ActorSpec, *, rank: int, world_size: int, master_addr: str, master_port: int, local_rank: int = 0
    ) -> None:
        """Join the world (unless this process has), load the HF checkpoint and build the optimizer.

        Raises ``ConfigError`` on a layout or model it cannot train, ``CheckpointError`` on an unusable HF folder.
        """
        groups.check_layout(spec.layout, world_size)
        host.install(spec.device)
        device = groups.join_world(spec, rank, world_size, (master_addr, master_port), local_rank)
        place = groups.make_groups(spec, device)

        from slime_like.train.megatron.trainer import RankTrainer

        self.version = 0
        self.deadline_s = spec.deadline_s
        self._pending: PendingSave | None = None
        self.dp_rank = place.dp_rank
        self.is_pipeline_last = place.is_last
        self.is_reporter = place.is_reporter
        self.trainer = RankTrainer(spec, place)

    def step(self, steps: Sequence[Sequence[Rows]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Train on one rollout: ``steps[k]`` are this dp rank's rows of optimizer step k, ``num_tokens[k]`` its global
        count of trained tokens. The reporter returns metrics of all ranks, the others ()."""
        metrics = self.trainer.train(steps, num_tokens, self.version)
        self.version += 1
        return metrics

    def score(self, rows: Rows) -> F32 | None:
        """[T] log-probabilities at the sampling temperature, 0 at first tokens, on the reporter; else None."""
        return self.trainer.score(rows)

    def weights(self) -> WeightSource:
        """The live weights in HF names and shapes."""
        return self.trainer.export()

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Copy everything as it is now and begin to write ``folder/iter_<iteration>``; training may go on."""
        from slime_like.train.megatron import checkpoint

        assert self._pending is None, "finish_save comes first"
        self._pending = checkpoint.begin(self.trainer.checkpoint_parts(), folder, iteration, self.version)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether the checkpoint that was begun is whole and in its folder; without ``wait`` only if no rank still writes.

        Raises ``CheckpointError`` on every rank when a rank could not write its part.
        """
        pending = self._pending
        if pending is not None and (wait or pending.is_written()):
            self._pending = None
            pending.finish(self.deadline_s)
        return self._pending is None

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint and name it the latest of ``folder``: for ranks without a driver."""
        from slime_like.train.megatron.collective import on_rank_zero

        self.begin_save(folder, iteration)
        self.finish_save(wait=True)
        on_rank_zero(lambda: name_latest(folder, iteration))

    def load(self, folder: Path, iteration: int | None = None) -> int:
        """Restore an iteration of ``folder`` (None: the latest), of any layout; returns which.

        Raises ``CheckpointError`` when it is missing, torn, of another model, or of a layout that cannot become this one.
        """
        from slime_like.train.megatron import checkpoint

        chosen = latest_iteration(folder) if iteration is None else iteration
        self.version = checkpoint.load(self.trainer.checkpoint_parts(), folder, chosen)
        return chosen

    def export_hf(self, folder: Path) -> None:
        """Write an HF folder that transformers and SGLang load."""
        self.trainer.export_hf(folder)
