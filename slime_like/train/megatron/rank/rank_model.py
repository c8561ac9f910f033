"""One rank of a trained role: a model with its optimizer, its checkpoints, other weights swapped in, and the open rollout."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from slime_like.batch import Columns, PackedBatch
from slime_like.checkpoint.files import latest_iteration, name_latest
from slime_like.config.schema.resolved import ActorSpec
from slime_like.distributed.wrapper import install
from slime_like.metrics.types import Metric
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.forward import MicroBatch, check_tokens, make_micro, to_device
from slime_like.train.megatron.model.model import PolicyModel, build_chunks, load_hf, named_weights
from slime_like.train.megatron.model.transformer_config import choose_family, transformer_config
from slime_like.train.megatron.model_io import checkpoint, initial
from slime_like.train.megatron.platform import host
from slime_like.train.megatron.platform.collective import on_rank_zero
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank import determinism
from slime_like.train.megatron.step import optim
from slime_like.types import F32


class RankModel:
    """A model and its optimizer on one rank, loaded from an HF folder.

    Methods are collectives: every rank of the role calls them in the same order. ``version`` counts the rollouts trained on.
    """

    def __init__(self, spec: ActorSpec, rank_info: RankInfo, kind: type[PolicyModel] = PolicyModel) -> None:
        self.spec = spec
        self.rank_info = rank_info
        self.version = 0
        self._pending: checkpoint.PendingSave | None = None
        self._rollout: OpenRollout | None = None
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

    # ---- weights -------------------------------------------------------------------------------------------------
    def _start(self) -> None:
        """Load the weights that the run starts from."""
        path = self.spec.model.megatron_checkpoint
        if path is None or self.model.last.head != PolicyModel.head:  # that checkpoint is the policy's
            load_hf(self.model, self.table, self.folder, self.rank_info)
        else:
            key, verify = "model.megatron_checkpoint", self.spec.verify
            initial.fill(self.model, key, path, self.table, self.family, self.rank_info, verify=verify)

    def weights_of(self, key: str, folder: str | None) -> dict[str, Tensor]:
        """Return this rank's shards of another checkpoint of the same shape (None: the policy's), on the host."""
        if folder in (None, self.spec.model.megatron_checkpoint or self.spec.model.hf_checkpoint):
            return self._host_copy()
        initial.fill(self.model, key, folder, self.table, self.family, self.rank_info, verify=self.spec.verify)
        weights = self._host_copy()
        self._start()
        return weights

    def _host_copy(self) -> dict[str, Tensor]:
        return {key: parameter.detach().cpu().clone() for key, parameter in named_weights(self.model)}

    @contextmanager
    def swapped(self, weights: dict[str, Tensor]) -> Generator[None]:
        """Put ``weights`` into the model, and the policy's back at exit, bit for bit."""
        policy = self._host_copy()
        self._fill(weights)
        try:
            yield
        finally:
            self._fill(policy)

    @torch.no_grad()
    def _fill(self, weights: dict[str, Tensor]) -> None:
        for key, parameter in named_weights(self.model):
            parameter.copy_(weights[key])

    # ---- rollouts ------------------------------------------------------------------------------------------------
    def micro(self, rows: PackedBatch) -> MicroBatch:
        """Lay out one micro-batch. Raises ``DataError`` on a token that the model does not have."""
        check_tokens(rows, int(self.family.hf.vocab_size), self.folder.path / "config.json")
        return make_micro(rows, self.rank_info)

    def open(self, steps: Sequence[Sequence[PackedBatch]]) -> OpenRollout:
        """Lay out the rows of a rollout, per optimizer step, and keep it open until ``close``."""
        self._rollout = OpenRollout([[self.micro(rows) for rows in step] for step in steps])
        return self._rollout

    @property
    def rollout(self) -> OpenRollout:
        """The open rollout."""
        assert self._rollout is not None, "open comes first"
        return self._rollout

    def close(self) -> OpenRollout:
        """Return the open rollout, which ends."""
        rollout, self._rollout = self.rollout, None
        return rollout

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def checkpoint_parts(self) -> checkpoint.Parts:
        """Return the objects that a checkpoint holds."""
        optim.settle_weights(self.wrapped)
        return checkpoint.Parts(
            self.model, self.optimizer, self.schedule, self.family, self.rank_info, self.folder.key, self.spec.verify
        )

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Take a snapshot and start to write ``folder/iter_<iteration>``; training may continue."""
        assert self._pending is None, "finish_save comes first"
        with install.phase("save"):
            self._pending = checkpoint.begin(self.checkpoint_parts(), folder, iteration, self.version)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the pending checkpoint is complete; without ``wait``, False while a rank still writes.

        Raises ``CheckpointError`` on every rank if a rank could not write its part.
        """
        pending = self._pending
        if pending is None:
            return True
        with install.phase("save"):
            if wait or pending.is_written():
                self._pending = None
                pending.finish(self.spec.deadline_s)
        return self._pending is None

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint and name it the latest of ``folder``: for ranks without a driver."""
        self.begin_save(folder, iteration)
        self.finish_save(wait=True)
        on_rank_zero(lambda: name_latest(folder, iteration))

    def load(self, folder: Path, iteration: int | None = None) -> int:
        """Restore an iteration of ``folder`` (None: the latest), of any layout. Returns the iteration.

        Raises ``CheckpointError`` if it is missing, torn, of another model, or of an incompatible layout.
        """
        chosen = latest_iteration(folder) if iteration is None else iteration
        with install.phase("load"):
            self.version = checkpoint.load(self.checkpoint_parts(), folder, chosen)
        return chosen


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

    def nested(self, columns: Sequence[Tensor]) -> Columns:
        """Return the columns of all micro-batches on the host, grouped by optimizer step."""
        flat: Iterator[F32] = iter([column.cpu().numpy() for column in columns])
        return [[next(flat) for _ in step] for step in self.plan]

    def fill(self, name: str, columns: Columns, device: torch.device) -> None:
        """Set field ``name`` of the micro-batches to ``columns``, which another role computed."""
        for micros, values in zip(self.plan, columns, strict=True):
            for micro, column in zip(micros, values, strict=True):
                tokens = micro.layout.num_tokens
                assert column.shape == (tokens,), f"{name}: {column.shape} for {tokens}"
                setattr(micro, name, to_device(column, device))
