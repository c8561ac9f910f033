"""Common parts of the ranks of every trained role: a model with its optimizer, and the open rollout."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from slime_like.batch import PackedBatch
from slime_like.config.schema.resolved import ActorSpec
from slime_like.metrics.types import Metric
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.forward import MicroBatch, check_tokens, make_micro
from slime_like.train.megatron.model.model import PolicyModel, build_chunks, load_hf
from slime_like.train.megatron.model.transformer_config import choose_family, transformer_config
from slime_like.train.megatron.platform import host
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank import determinism
from slime_like.train.megatron.step import optim
from slime_like.train.megatron.weights import checkpoint, initial


class RankModel:
    """A model and its optimizer on one rank, loaded from an HF folder. Methods are collectives."""

    def __init__(self, spec: ActorSpec, rank_info: RankInfo, kind: type[PolicyModel] = PolicyModel) -> None:
        self.spec = spec
        self.rank_info = rank_info
        self.folder = HFFolder(spec.model.hf_checkpoint, spec.model_key)
        self.family = choose_family(spec, kind.adapt(self.folder.config()))
        self.table = self.family.weights()
        if spec.deterministic:
            determinism.require(rank_info.device, self.table.values())
        config = transformer_config(spec, self.family)
        self.model = build_chunks(kind, config, self.family, rank_info, spec.model)
        self._start()
        self.wrapped = optim.wrap(spec, self.model)
        self.optimizer = optim.make_optimizer(spec, self.wrapped)
        self.schedule = optim.make_schedule(spec, self.optimizer)
        host.verify()

    def _start(self) -> None:
        """Load the weights that the run starts from."""
        path = self.spec.model.megatron_checkpoint
        if path is None or self.model.last.head != PolicyModel.head:  # that checkpoint is the policy's
            load_hf(self.model, self.table, self.folder, self.rank_info)
        else:
            key, verify = "model.megatron_checkpoint", self.spec.verify
            initial.fill(self.model, key, path, self.table, self.family, self.rank_info, verify=verify)

    def micro(self, rows: PackedBatch) -> MicroBatch:
        """Lay out one micro-batch. Raises ``DataError`` on a token that the model does not have."""
        check_tokens(rows, int(self.family.hf.vocab_size), self.folder.path / "config.json")
        return make_micro(rows, self.rank_info)

    def checkpoint_parts(self) -> checkpoint.Parts:
        """Return the objects that a checkpoint holds."""
        optim.settle_weights(self.wrapped)
        return checkpoint.Parts(
            self.model, self.optimizer, self.schedule, self.family, self.rank_info, self.folder.key, self.spec.verify
        )


@dataclass(slots=True)
class OpenRollout:
    """A rollout on this rank between scoring and the optimizer steps."""

    plan: list[list[MicroBatch]]  # per optimizer step
    metrics: list[Metric] = field(default_factory=list[Metric])
    seconds: float = 0.0  # spent on it

    @contextmanager
    def timed(self) -> Generator[None]:
        """Add the time spent inside to ``seconds``."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    @property
    def micros(self) -> list[MicroBatch]:
        """All micro-batches, in order."""
        return [micro for step in self.plan for micro in step]
