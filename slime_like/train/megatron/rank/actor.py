"""One trainer rank: process group, model, optimizer, and the verbs of the trainer.

megatron is imported when a ``MegatronActor`` is made, after ``host.install``: importing this file costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.resolved import ActorSpec
from slime_like.distributed.wrapper import install
from slime_like.interfaces import NamesKernels, WeightSource
from slime_like.metrics.types import Metric
from slime_like.train.megatron.platform import groups
from slime_like.train.megatron.weights.checkpointed import CheckpointedRank
from slime_like.types import F32
from slime_like.util.ports import Meeting

if TYPE_CHECKING:
    from slime_like.train.megatron.weights.checkpoint import Parts


class MegatronActor(CheckpointedRank):
    """A rank of the trainer. Every rank calls the same methods in the same order; all are collective.

    ``version`` counts the rollouts trained on. Exactly one rank of the world ``is_reporter``: its metrics and scores
    are the ones that count.
    """

    def __init__(self, spec: ActorSpec, *, rank: int, world_size: int, master: Meeting, local_rank: int = 0) -> None:
        """Join the world (unless this process has), load the HF checkpoint and build the optimizer.

        Raises ``ConfigError`` on a layout or model it cannot train, ``CheckpointError`` on an unusable HF folder.
        """
        place = groups.enter(spec, rank=rank, world_size=world_size, master=master, local_rank=local_rank)

        from slime_like.train.megatron.rank.trainer import RankTrainer

        super().__init__(spec.deadline_s)
        self.dp_rank = place.dp_rank
        self.is_pipeline_last = place.is_last
        self.is_reporter = place.is_reporter
        self.trainer = RankTrainer(spec, place)

    def step(self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Train on one rollout: ``steps[k]`` are this dp rank's rows of optimizer step k, ``num_tokens[k]`` its global
        count of trained tokens. The reporter returns metrics of all ranks, the others what
        the wrapper counted there."""
        with install.phase("step"):
            metrics = self.trainer.train(steps, num_tokens, self.version)
        self.version += 1
        return (*metrics, *install.drain())

    def open_rollout(self, steps: Sequence[Sequence[PackedBatch]]) -> None:
        """First third of ``step``: the scores of this rank's own policies."""
        with install.phase("step"):
            self.trainer.open_rollout(steps)

    def estimate(self, columns: Mapping[str, Columns]) -> Columns | None:
        """Second third: advantages, with the ``columns`` of other roles. What a critic is to learn, where there is one."""
        with install.phase("step"):
            return self.trainer.estimate(columns)

    def update(self, num_tokens: Sequence[int], *, frozen: bool) -> tuple[Metric, ...]:
        """Last third: the optimizer steps, none if ``frozen``; the version counts on in any case."""
        with install.phase("step"):
            metrics = self.trainer.update(num_tokens, self.version, frozen=frozen)
        self.version += 1
        return (*metrics, *install.drain())

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Advantages per token of some samples of the rollout before, as far as this rank speaks for them."""
        return self.trainer.token_advantages(sample_ids)

    def score(self, rows: PackedBatch, exact: str | None = None) -> F32 | None:
        """[T] log-probabilities at the sampling temperature, 0 at first tokens, on the reporter; else None."""
        with install.phase("score"):
            return self.trainer.score(rows, exact)

    def layer_kinds(self) -> tuple[str, ...]:
        """Kinds of layers on this rank that ``score`` can compute in float64."""
        from slime_like.train.megatron.model.exact_layers import kinds

        return kinds(self.trainer.model)

    def kernels(self) -> tuple[str, ...]:
        """What layers with kernels to choose from say of those that have run on this rank."""
        layers = self.trainer.model.modules()
        return tuple(sorted({layer.kernels() for layer in layers if isinstance(layer, NamesKernels)}))

    def weights(self) -> WeightSource:
        """The live weights in HF names and shapes."""
        return self.trainer.export()

    def parts(self) -> Parts:
        """What its checkpoints hold."""
        return self.trainer.checkpoint_parts()

    def export_hf(self, folder: Path) -> None:
        """Write an HF folder that transformers and SGLang load."""
        with install.phase("export"):
            self.trainer.export_hf(folder)
