"""Megatron distributed checkpoints (torch_dist): model, optimizer, schedule, RNG and version, loadable in any layout.

A save has two halves. ``begin`` takes a snapshot, which a thread writes; ``PendingSave.finish`` waits for the threads of
all ranks and renames the folder. Training in between does not change the checkpoint.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from torch.distributed.checkpoint import CheckpointException

from slime_like.checkpoint.files import ROLLOUT, SCRATCH, iteration_folder, publish, side_files
from slime_like.checkpoint.hashes import FileRecord, hash_files
from slime_like.checkpoint.record import (
    Manifest,
    Scalar,
    check_value_head,
    write_manifest,
    written_files,
)
from slime_like.config.rules.saved_model import check_padding
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.base import Family
from slime_like.train.megatron.model.model import Chunks
from slime_like.train.megatron.model_io.damage import checked_manifest, damage_named, error_summary
from slime_like.train.megatron.platform import patches
from slime_like.train.megatron.platform.collective import make_empty, on_rank_zero
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util.deadline import Deadline


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of one rank that a checkpoint holds."""

    model: Chunks
    optimizer: Any
    schedule: Any
    family: Family
    rank_info: RankInfo
    key: str = "model.hf_checkpoint"  # config key of the model
    verify: bool = True  # compare a checkpoint with its hashes before loading it


# ---- save ------------------------------------------------------------------------------------------------------------
class PendingSave:
    """A snapshot of this rank and the thread that writes it. Methods are collective."""

    def __init__(self, request: Any, target: Path, manifest: Manifest, rank_info: RankInfo) -> None:
        self.target = target
        self._scratch = _scratch(target)
        self._manifest = manifest
        self._rank_info = rank_info
        self._finalize: list[Callable[[], None]] = list(request.finalize_fns)
        self._error: str | None = None
        self._hashes: dict[str, str] = {}  # by file that this rank writes
        self._rollout: dict[str, FileRecord] | None = None
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:  # a rank may have nothing to write
            arguments = [*request.async_fn_args]
            arguments[1] = _copied(arguments[1], request.preload_fn())
            keywords = dict(request.async_fn_kwargs)
            self._thread = threading.Thread(
                target=self._write, args=(request.async_fn, arguments, keywords), name="checkpoint", daemon=True
            )
            self._thread.start()

    def _write(self, write: Callable[..., None], arguments: list[Any], keywords: dict[str, Any]) -> None:
        errors: list[Exception] = []
        try:
            with patches.save_errors() as errors:
                write(*arguments, **keywords)
            results: queue.Queue[Any] = arguments[-1]
            outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                raise outcome
            results.put(outcome)  # for the finalisation
            files = {name: Path(path) for path, name, _ in arguments[1]}
            self._hashes = dict(zip(files, hash_files(list(files.values())), strict=True))
            if dist.get_rank() == 0:
                self._rollout = self._rollout_side()
        except BaseException as error:  # noqa: BLE001  the fault boundary of the thread: finish raises it on every rank
            self._error = error_summary(errors[0] if errors else error)

    def is_written(self) -> bool:
        """Return True if the threads of all ranks have ended, so that ``finish`` does not wait for a disk."""
        busy = torch.tensor(
            [float(self._thread is not None and self._thread.is_alive())], device=self._rank_info.device
        )
        dist.all_reduce(busy, op=dist.ReduceOp.MAX)
        return not busy.item()

    def finish(self, deadline_s: float) -> None:
        """Wait for every rank's files and rename the folder.

        Raises ``CheckpointError`` on every rank if one failed, after removing the written files.
        """
        try:
            self._join(deadline_s)
            with patches.save_errors() as errors:
                for step in self._finalize:
                    step()
            on_rank_zero(lambda: self._name(errors))
        # CheckpointException is a BaseException: `except Exception` misses it.
        except (CheckpointError, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(self._scratch, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise _failed(self.target, error_summary(error)) from error

    def _join(self, deadline_s: float) -> None:
        if self._thread is not None:
            deadline = Deadline(f"rank {dist.get_rank()}", "save", deadline_s)
            self._thread.join(deadline.remaining("the disk"))
            if self._thread.is_alive():
                raise deadline.exceeded(f"the disk of {self._scratch}")
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (self._error, self._hashes))
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(outcomes) if error]
        if errors:
            raise _failed(self.target, "; ".join(errors))
        self._hashes = {name: sha for _, hashes in outcomes for name, sha in hashes.items()}

    def _name(self, errors: Sequence[Exception]) -> None:
        if errors:
            raise errors[-1]
        rollout = self._rollout_side() if self._rollout is None else self._rollout
        write_manifest(self._scratch, self._manifest, hashes=self._hashes, rollout=rollout)
        publish(self._scratch, self.target)

    def _rollout_side(self) -> dict[str, FileRecord]:
        """Return the files that the driver wrote before this save began."""
        folder = self.target.parent
        return written_files(folder / ROLLOUT, side_files(folder, self._manifest.iteration))


def begin(parts: Parts, folder: Path, iteration: int, version: int) -> PendingSave:
    """Take a snapshot and start to write ``folder/iter_<iteration>``. Collective."""
    target = iteration_folder(folder, iteration)
    scratch = _scratch(target)
    on_rank_zero(lambda: make_empty(scratch))
    state = _sharded_state(parts, loading=False)
    state["rng"] = _rng_object(parts.rank_info, _rng_state())
    group = parts.optimizer.param_groups[0]
    manifest = Manifest(
        iteration=iteration,
        version=version,
        schedule_steps=int(parts.schedule.num_steps),
        max_lr=float(group["max_lr"]),
        min_lr=float(group["min_lr"]),
        distributed_optimizer=parts.rank_info.layout.distributed_optimizer,
        layout=_layout(parts.rank_info),
        model=_fingerprint(parts.family, parts.model.last.head),
    )
    try:
        request = dist_checkpointing.save(
            state,
            str(scratch),
            get_default_save_sharded_strategy("torch_dist"),
            async_sharded_save=True,
            async_strategy="mcore",
            content_metadata=_content(),
        )
    except CheckpointException as error:
        raise _failed(target, error_summary(error)) from error
    return PendingSave(request, target, manifest, parts.rank_info)


def _copied(buckets: list[Any], on_host: list[Any]) -> list[Any]:
    """Clone the tensors of ``on_host`` that the next step would overwrite: megatron copies from devices only."""
    out: list[Any] = []
    for (_, _, (_, live)), (file, key, (data, tensors)) in zip(buckets, on_host, strict=True):
        pairs = zip(live, tensors, strict=True)
        copies = [
            (item, tensor.detach().clone() if tensor.data_ptr() == source.data_ptr() else tensor)
            for (_, source), (item, tensor) in pairs
        ]
        out.append((file, key, (data, copies)))
    return out


def _scratch(target: Path) -> Path:
    return target.with_name(target.name + SCRATCH)


def _failed(target: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{target}: the save failed ({reason}); is the disk full? The previous checkpoint is unchanged"
    )


# ---- load ------------------------------------------------------------------------------------------------------------
def load(parts: Parts, folder: Path, iteration: int) -> int:
    """Restore ``folder/iter_<iteration>``, written in any layout. Returns its version. Collective.

    Raises ``CheckpointError`` if it is missing, torn, of another model, or of an incompatible layout.
    """
    source = iteration_folder(folder, iteration)
    manifest = checked_manifest(source, verify=parts.verify)
    _check_model(manifest, parts, source)
    _check_optimizer(manifest, parts, source)
    with damage_named(
        lambda reason: f"{source}: torn, or not a checkpoint of this trainer ({reason}); use an earlier iteration"
    ):
        _restore(parts, source, manifest)
    return manifest.version


def load_weights(parts: Parts, source: Path) -> None:
    """Load only the weights of an iteration's folder. Collective; raises like ``load``."""
    _check_model(checked_manifest(source, verify=parts.verify), parts, source)
    metadata = {**_content(), "dp_cp_group": parts.rank_info.dp_cp_group}
    state: dict[str, Any] = {"model": parts.model.sharded_state_dict(metadata=metadata)}
    with damage_named(lambda reason: f"{source}: torn ({reason}); use another iteration"):
        loaded: Any = dist_checkpointing.load(state, str(source), get_default_load_sharded_strategy(str(source)))
    parts.model.load_state_dict(loaded["model"])
    parts.optimizer.reload_model_params()  # it keeps its own copies


def _restore(parts: Parts, source: Path, manifest: Manifest) -> None:
    groups = parts.optimizer.param_groups
    configured_lrs = [(group["max_lr"], group["min_lr"]) for group in groups]
    for group in groups:  # megatron matches saved groups by these too; the config may have changed
        group.update(max_lr=manifest.max_lr, min_lr=manifest.min_lr)
    state = _sharded_state(parts, loading=True)
    same_layout = manifest.layout == _layout(parts.rank_info)
    if same_layout:  # RNG states belong to ranks
        state["rng"] = _rng_object(parts.rank_info, None)
    loaded: Any = dist_checkpointing.load(state, str(source), get_default_load_sharded_strategy(str(source)))
    parts.model.load_state_dict(loaded["model"])
    with torch.no_grad():
        parts.optimizer.load_state_dict(loaded["optimizer"])
    for group, (max_lr, min_lr) in zip(parts.optimizer.param_groups, configured_lrs, strict=True):
        group["max_lr"], group["min_lr"] = max_lr, min_lr
    parts.schedule.num_steps = manifest.schedule_steps
    parts.schedule.step(0)
    if same_layout:
        _set_rng_state(loaded["rng"][0])


def _sharded_state(parts: Parts, *, loading: bool) -> dict[str, Any]:
    metadata = {**_content(), "dp_cp_group": parts.rank_info.dp_cp_group}
    if not loading:
        _fill_state(parts.optimizer)
    state: dict[str, Any] = {"model": parts.model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = parts.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
    return state


def _fill_state(optimizer: Any) -> None:
    """Create zero moments if no step was taken yet (filters can drop every sample): megatron requires them."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def _content() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _check_model(manifest: Manifest, parts: Parts, source: Path) -> None:
    if parts.model.last.head == "value":
        check_value_head(source, manifest)
    check_model(manifest, parts.family, parts.model.last.head, source, parts.key)


def _check_optimizer(manifest: Manifest, parts: Parts, source: Path) -> None:
    configured = parts.rank_info.layout.distributed_optimizer
    if manifest.distributed_optimizer != configured:
        raise CheckpointError(
            f"{source}: saved with parallel.distributed_optimizer={manifest.distributed_optimizer}, "
            f"which cannot be loaded with {configured}: set it as it was"
        )


def check_model(manifest: Manifest, family: Family, head: str, source: Path, key: str = "model.hf_checkpoint") -> None:
    """Raise ``CheckpointError`` unless the checkpoint is of the family's model, the value of ``key``, with head ``head``."""
    check_padding(manifest, source, family.padded_vocabulary, family.tp)
    expected, saved = _fingerprint(family, head), manifest.model
    for name in expected:
        if expected[name] != saved.get(name):
            raise CheckpointError(
                f"{source}: of another model: {name} is {saved.get(name)} there and {expected[name]} in "
                f"{key}; use the model that the checkpoint was trained from"
            )


def _fingerprint(family: Family, head: str) -> dict[str, Scalar]:
    hf = family.hf
    keys = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    shape = ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {
        **{key: getattr(hf, key, None) for key in (*keys, *shape, *(experts if family.num_experts else ()))},
        **{key: getattr(hf, key) for key in family.shape_keys},
        **({"layer_pattern": "".join(family.blocks())} if family.shape_keys else {}),
        "head": head,
        "padded_vocabulary": family.padded_vocabulary,  # depends on parallel.tp if that does not divide 128
    }


def _layout(rank_info: RankInfo) -> dict[str, int]:
    sizes = rank_info.layout
    return {"tp": sizes.tp, "pp": sizes.pp, "cp": sizes.cp, "dp": sizes.dp, "ep": sizes.ep}


def _rng_object(rank_info: RankInfo, state: Any) -> ShardedObject:
    sizes = rank_info.layout
    shape = (sizes.pp, sizes.tp, sizes.cp, sizes.dp)
    offset = (rank_info.pp_rank, rank_info.tp_rank, rank_info.cp_rank, rank_info.dp_rank)
    return ShardedObject("rng", state, shape, offset, replica_id=0)


def _rng_state() -> list[dict[str, Any]]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "tracker": _tracker().get_states(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return [state]


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    _tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
