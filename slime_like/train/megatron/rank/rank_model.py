"""One rank of a trained role: model and optimizer, swapping of weights, the open rollout, and checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from slime_like.batch import Columns, PackedBatch
from slime_like.checkpoint.files import latest_iteration
from slime_like.config.schema.resolved import RankSpec
from slime_like.distributed.wrapper import install
from slime_like.metrics.types import Metric
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.forward import MicroBatch, check_tokens, make_micro, to_device
from slime_like.train.megatron.model.model import PolicyModel, build_segments, load_hf, named_weights
from slime_like.train.megatron.model.transformer_config import choose_family, transformer_config
from slime_like.train.megatron.model_io.host_weights import copy_from_host, copy_to_host
from slime_like.train.megatron.model_io.initial import load_initial_weights
from slime_like.train.megatron.model_io.load import load_checkpoint
from slime_like.train.megatron.model_io.rank_state import RankState
from slime_like.train.megatron.model_io.save import PendingSave, begin_save
from slime_like.train.megatron.platform import host
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank import determinism
from slime_like.train.megatron.rank.residency import trained_state
from slime_like.train.megatron.step import optim
from slime_like.types import F32


class RankModel:
    """Model and optimizer of one rank.

    The initial weights are those of an HF folder or, for a policy, of ``model.megatron_checkpoint`` if it is set. Methods that
    compute, save or load are collectives: every rank of the role calls them in the same order. ``version`` counts rollouts:
    in a policy, also empty rollouts and those in which its weights are frozen.
    """

    def __init__(self, spec: RankSpec, rank_info: RankInfo, kind: type[PolicyModel] = PolicyModel) -> None:
        self.spec = spec
        self.rank_info = rank_info
        self.version = 0
        self._pending_save: PendingSave | None = None
        self._rollout: OpenRollout | None = None
        self._own_weights: dict[str, Tensor] | None = None  # on a GPU, pinned buffers that ``swap_weights`` reuses
        self.folder = HFFolder(spec.model.hf_checkpoint, spec.model_key)
        self.family = choose_family(spec, kind.adapt_config(self.folder.config()))
        self.table = self.family.weights()
        if spec.deterministic:
            determinism.require(rank_info.device, self.table.values())
        config = transformer_config(spec, self.family)
        self.model = build_segments(kind, config, self.family, rank_info, spec.model)
        self._load_initial()
        self.wrapped = optim.wrap(spec, self.model)
        self.optimizer = optim.make_optimizer(spec, self.wrapped)
        self.schedule = optim.make_schedule(spec, self.optimizer)
        self.device_state = trained_state(self.wrapped, self.optimizer, rank_info.device)
        host.verify()

    # ---- weights -------------------------------------------------------------------------------------------------
    def _load_initial(self) -> None:
        """Load the initial weights of the run."""
        path = self.spec.model.megatron_checkpoint
        if path is None or self.model.last.head != PolicyModel.head:  # megatron_checkpoint holds a policy
            load_hf(self.model, self.table, self.folder, self.rank_info)
        else:
            self._load_weights("model.megatron_checkpoint", path)

    def _load_weights(self, key: str, folder: str) -> None:
        info, verify = self.rank_info, self.spec.verify
        load_initial_weights(self.model, key, folder, self.table, self.family, info, verify=verify)

    def read_weights(self, key: str, folder: str | None) -> dict[str, Tensor]:
        """Return host copies of this rank's shards of the weights in ``folder`` or, if that is None, of the initial weights.

        The model must still have its initial weights, and has them again afterwards. ``key`` is the config key of
        ``folder``. Collective. Raises ``CheckpointError`` as ``load_initial_weights`` does.
        """
        if folder in (None, self.spec.model.megatron_checkpoint or self.spec.model.hf_checkpoint):
            return self._host_copy()
        self._load_weights(key, folder)
        weights = self._host_copy()
        self._load_initial()
        return weights

    def _host_copy(self) -> dict[str, Tensor]:
        return copy_to_host(named_weights(self.model))

    @contextmanager
    def swap_weights(self, weights: dict[str, Tensor]) -> Generator[None]:
        """Put ``weights`` into the model, and restore the model's own weights at exit, bit for bit."""
        own_weights = copy_to_host(named_weights(self.model), self._own_weights)
        if self.rank_info.device.type == "cuda":  # pinning memory is slow
            self._own_weights = own_weights
        self._set_weights(weights)
        try:
            yield
        finally:
            self._set_weights(own_weights)

    def _set_weights(self, weights: dict[str, Tensor]) -> None:
        copy_from_host(named_weights(self.model), weights)

    # ---- rollouts ------------------------------------------------------------------------------------------------
    def lay_out(self, batch: PackedBatch) -> MicroBatch:
        """Lay out one micro-batch. Raises ``DataError`` on a token id outside the model's vocabulary."""
        check_tokens(batch, int(self.family.hf.vocab_size), self.folder.path / "config.json")
        return make_micro(batch, self.rank_info)

    def open(self, steps: Sequence[Sequence[PackedBatch]]) -> OpenRollout:
        """Lay out the batches of a rollout, grouped by optimizer step, and keep the rollout open until ``close``.

        Raises ``DataError`` as ``lay_out`` does.
        """
        self._rollout = OpenRollout([[self.lay_out(batch) for batch in step] for step in steps])
        return self._rollout

    @property
    def rollout(self) -> OpenRollout:
        """The open rollout; one must be open."""
        assert self._rollout is not None, "no rollout is open: call open first"
        return self._rollout

    def close(self) -> OpenRollout:
        """End the open rollout and return it."""
        rollout, self._rollout = self.rollout, None
        return rollout

    # ---- checkpoints ---------------------------------------------------------------------------------------------
    def state(self) -> RankState:
        """Gather the updated weights, and return the objects whose state a checkpoint holds. Collective."""
        optim.gather_parameters(self.wrapped)
        return RankState(
            self.model, self.optimizer, self.schedule, self.family, self.rank_info, self.folder.key, self.spec.verify
        )

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Take a snapshot and start to write ``folder/iter_<iteration>``; training may continue.

        Raises ``CheckpointError`` as ``save.begin_save`` does. No save may be pending.
        """
        assert self._pending_save is None, "a save is pending: call finish_save first"
        with install.phase("save"):
            self._pending_save = begin_save(self.state(), folder, iteration, self.version)

    def finish_save(self, *, wait: bool) -> bool:
        """Complete any pending checkpoint and return True.

        With ``wait=False``, return False if a rank is still writing. Raises ``CheckpointError`` on every rank if a rank failed
        to write its part or did not write it in time, or if the folder cannot be completed.
        """
        pending_save = self._pending_save
        if pending_save is None:
            return True
        with install.phase("save"):
            if wait or pending_save.is_written():
                self._pending_save = None
                pending_save.finish(self.spec.deadline_s)
        return self._pending_save is None

    def load(self, folder: Path, iteration: int | None = None) -> int:
        """Restore an iteration of ``folder`` (None: the latest), saved in any layout. Return the iteration.

        Raises ``CheckpointError`` as ``load_checkpoint`` and, without ``iteration``, ``latest_iteration`` do.
        """
        if iteration is None:
            iteration = latest_iteration(folder)
        with install.phase("load"):
            self.version = load_checkpoint(self.state(), folder, iteration)
        return iteration


@dataclass(slots=True)
class OpenRollout:
    """A rollout on this rank from the start of scoring until the optimizer steps begin."""

    micros_by_step: list[list[MicroBatch]]  # [optimizer step][micro-batch]
    metrics: list[Metric] = field(default_factory=list[Metric])

    @property
    def micros(self) -> list[MicroBatch]:
        """All micro-batches, in order."""
        return [micro for step in self.micros_by_step for micro in step]

    def group_by_step(self, columns: Sequence[Tensor]) -> Columns:
        """Return the columns of all micro-batches on the host, grouped by optimizer step."""
        flat: Iterator[F32] = iter([column.cpu().numpy() for column in columns])
        return [[next(flat) for _ in step] for step in self.micros_by_step]

    def fill(self, name: str, columns: Columns, device: torch.device) -> None:
        """Set field ``name`` of the micro-batches to ``columns``, which another role has computed."""
        for micros, values in zip(self.micros_by_step, columns, strict=True):
            for micro, column in zip(micros, values, strict=True):
                tokens = micro.layout.num_tokens
                assert column.shape == (tokens,), f"{name}: shape {column.shape} for {tokens} tokens"
                setattr(micro, name, to_device(column, device))
