"""One trainer rank: process group, model, optimizer, and the trainer's methods.

megatron is imported in ``MegatronActor.__init__``, after ``host.install``, so that importing this file is cheap.
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

    ``version`` counts the rollouts trained on. Exactly one rank of the world is the reporter (``is_reporter``): only its
    metrics and scores are used.
    """

    def __init__(self, spec: ActorSpec, *, rank: int, world_size: int, master: Meeting, local_rank: int = 0) -> None:
        """Join the world (unless already joined), load the HF checkpoint and build the optimizer.

        Raises ``ConfigError`` on a layout or model it cannot train, ``CheckpointError`` on an unusable HF folder.
        """
        rank_info = groups.enter(spec, rank=rank, world_size=world_size, master=master, local_rank=local_rank)

        from slime_like.train.megatron.rank.trainer import RankTrainer

        super().__init__(spec.deadline_s)
        self.dp_rank = rank_info.dp_rank
        self.is_pipeline_last = rank_info.is_last
        self.is_reporter = rank_info.is_reporter
        self.trainer = RankTrainer(spec, rank_info)

    def step(self, steps: Sequence[Sequence[PackedBatch]], num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Train on one rollout.

        ``steps[k]`` are this dp rank's rows of optimizer step k, ``num_tokens[k]`` the step's global count of trained
        tokens. The reporter returns the metrics of all ranks; every rank adds its own counters of collectives.
        """
        with install.phase("step"):
            metrics = self.trainer.train(steps, num_tokens, self.version)
        self.version += 1
        return (*metrics, *install.drain())

    def open_rollout(self, steps: Sequence[Sequence[PackedBatch]]) -> None:
        """Compute the log-probabilities of this rank's policies: the first third of ``step``."""
        with install.phase("step"):
            self.trainer.open_rollout(steps)

    def estimate(self, columns: Mapping[str, Columns]) -> Columns | None:
        """Compute advantages from ``columns`` of other roles: the second third of ``step``. Returns a critic's targets, if any."""
        with install.phase("step"):
            return self.trainer.estimate(columns)

    def update(self, num_tokens: Sequence[int], *, frozen: bool) -> tuple[Metric, ...]:
        """Take the optimizer steps, none if ``frozen``: the last third of ``step``. Always increments the version."""
        with install.phase("step"):
            metrics = self.trainer.update(num_tokens, self.version, frozen=frozen)
        self.version += 1
        return (*metrics, *install.drain())

    def token_advantages(self, sample_ids: Collection[int]) -> dict[int, F32]:
        """Return advantages per token of the given samples of the last rollout, if this rank speaks for their shard."""
        return self.trainer.token_advantages(sample_ids)

    def score(self, rows: PackedBatch, exact: str | None = None) -> F32 | None:
        """Return log-probabilities [T] at the sampling temperature, 0 at first tokens; None except on the reporter."""
        with install.phase("score"):
            return self.trainer.score(rows, exact)

    def layer_kinds(self) -> tuple[str, ...]:
        """Return the kinds of layers on this rank that ``score`` can compute in float64."""
        from slime_like.train.megatron.model.exact_layers import kinds

        return kinds(self.trainer.model)

    def kernels(self) -> tuple[str, ...]:
        """Describe the kernels that each multi-backend layer of this rank has used."""
        layers = self.trainer.model.modules()
        return tuple(sorted({layer.kernels() for layer in layers if isinstance(layer, NamesKernels)}))

    def weights(self) -> WeightSource:
        """Return the live weights in HF names and shapes."""
        return self.trainer.export()

    def parts(self) -> Parts:
        """Return the objects that its checkpoints hold."""
        return self.trainer.checkpoint_parts()

    def export_hf(self, folder: Path) -> None:
        """Write an HF folder that transformers and SGLang load."""
        with install.phase("export"):
            self.trainer.export_hf(folder)
