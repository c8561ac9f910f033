"""Saving of a checkpoint in megatron's torch_dist format, loadable in any layout, while training continues.

``begin_save`` takes a snapshot, which a thread of each rank writes; ``PendingSave.finish`` waits for the threads of all
ranks and renames the folder. Training in between does not change the checkpoint.
"""

from __future__ import annotations

import gc
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from torch.distributed.checkpoint import CheckpointException

from slime_like.checkpoint.files import ROLLOUT, SCRATCH, iteration_folder, publish, side_files
from slime_like.checkpoint.hashes import FileRecord, hash_files
from slime_like.checkpoint.record import Manifest, describe_files, write_manifest
from slime_like.errors import CheckpointError
from slime_like.train.megatron.model_io.damage import summarize_error
from slime_like.train.megatron.model_io.fingerprint import fingerprint
from slime_like.train.megatron.model_io.node_files import gather_files, is_node_leader, on_other_nodes
from slime_like.train.megatron.model_io.rank_state import (
    RankState,
    content_metadata,
    layout_sizes,
    rng_object,
    rng_state,
    sharded_state,
)
from slime_like.train.megatron.platform import patches
from slime_like.train.megatron.platform.collective import make_empty, on_rank_zero
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util.deadline import Deadline

POLL_S = 1.0  # a rank waits at most this long for its thread before it hears of the other ranks' threads
LIMIT_SHARE = 0.9  # of the deadline, so that the error reaches the driver before the driver's own deadline
ENDED, WRITING, LATE = 0.0, 1.0, 2.0  # states of a thread; LATE: it still writes after the limit
_writer = threading.Lock()
"""Held by the thread of this process that writes. A thread that was late may still write when the next save begins."""


class PendingSave:
    """A snapshot of this rank's state, and the thread that writes it. Its public methods are collective."""

    def __init__(self, request: Any, target: Path, manifest: Manifest, rank_info: RankInfo) -> None:
        self.target = target
        self._scratch = _scratch(target)
        self._manifest = manifest
        self._rank_info = rank_info
        self._finalizers: list[Callable[[], None]] = list(request.finalize_fns)
        self._error: str | None = None
        self._any_abandoned = False  # True if a rank's thread had not ended when the save failed
        self._is_abandoned = False  # True if the save has failed, although its thread has not ended
        self._hashes: dict[str, str] = {}  # SHA-256 by name of the files that this rank writes
        self._rollout_files: dict[str, FileRecord] | None = None  # files that the driver wrote
        self._thread: threading.Thread | None = None
        if request.async_fn is not None:  # None on a rank that has nothing to write
            arguments = [*request.async_fn_args]
            arguments[1] = _clone_live(arguments[1], request.preload_fn())
            keywords = dict(request.async_fn_kwargs)
            self._thread = threading.Thread(
                target=self._write, args=(request.async_fn, arguments, keywords), name="checkpoint", daemon=True
            )
            self._thread.start()

    def _write(self, write: Callable[..., None], arguments: list[Any], keywords: dict[str, Any]) -> None:
        while not _writer.acquire(timeout=POLL_S):
            if self._is_abandoned:
                return
        try:
            self._write_files(write, arguments, keywords)
        finally:
            _writer.release()

    def _write_files(self, write: Callable[..., None], arguments: list[Any], keywords: dict[str, Any]) -> None:
        errors: list[Exception] = []
        if self._is_abandoned:
            return
        try:
            with patches.save_errors() as errors:
                write(*arguments, **keywords)
            results: queue.Queue[Any] = arguments[-1]
            outcome = results.get_nowait()
            if isinstance(outcome, Exception):
                # Not raised: its traceback and this frame would refer to each other and keep the snapshot.
                self._error = summarize_error(errors[0] if errors else outcome)
                return
            results.put(outcome)  # read by a finalizer
            files = {name: Path(path) for path, name, _ in arguments[1]}
            self._hashes = dict(zip(files, hash_files(list(files.values())), strict=True))
            if dist.get_rank() == 0:
                self._rollout_files = self._hash_rollout_files()
        except BaseException as error:  # noqa: BLE001  fault boundary of the thread; ``finish`` raises the error on every rank
            self._error = summarize_error(errors[0] if errors else error)

    def is_written(self) -> bool:
        """Return True if the threads of all ranks have ended, so that ``finish`` does not wait for them."""
        return self._latest_state(WRITING if self._is_writing() else ENDED) == ENDED

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _latest_state(self, state: float) -> float:
        """Return the largest of all ranks' thread states: ``ENDED`` < ``WRITING`` < ``LATE``. Collective."""
        largest = torch.tensor([state], device=self._rank_info.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest.item())

    def finish(self, deadline_s: float) -> None:
        """Wait for the files of every rank and rename the folder.

        Raises ``CheckpointError`` on every rank if a rank failed or has not written its files after ``LIMIT_SHARE`` of
        ``deadline_s`` (the message names the rank and the reason), or if the folder cannot be completed. The written files
        are then removed. If a thread is still writing, they are kept, because removing them could block too. Later saves
        of this process wait until the thread has ended. The next save of the same iteration removes the files; on a node
        that does not share rank 0's folder, the next save of any iteration does.
        """
        try:
            self._gather(self._join(deadline_s))
            with patches.save_errors() as errors:
                for finalize in self._finalizers:
                    finalize()
            on_rank_zero(lambda: self._publish(errors))
        # CheckpointException is a BaseException: `except Exception` misses it.
        except (CheckpointError, CheckpointException) as error:
            if is_node_leader(self._rank_info) and not self._any_abandoned:
                shutil.rmtree(self._scratch, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise _save_error(self.target, summarize_error(error)) from error

    def _join(self, deadline_s: float) -> list[list[str]]:
        """Wait for the thread of every rank; return the names of the files of each rank.

        Raises ``CheckpointError`` on every rank if one thread failed or did not end in time. The ranks exchange their
        states every ``POLL_S``, so that none waits in a collective until its timeout.
        """
        deadline = Deadline("the save", "save", LIMIT_SHARE * deadline_s)
        latest = WRITING
        while latest == WRITING:
            if self._thread is not None:
                self._thread.join(min(POLL_S, max(0.0, deadline.limit - deadline.elapsed())))
            is_late = deadline.elapsed() >= deadline.limit
            latest = self._latest_state((LATE if is_late else WRITING) if self._is_writing() else ENDED)
        self._any_abandoned, self._is_abandoned = latest == LATE, self._is_writing()
        if self._is_abandoned:
            gc.enable()  # megatron disables it in the whole process while it writes
        error = self._error
        if self._is_abandoned:
            waited = deadline.exceeded(f"the disk of {self._scratch}")
            error = f"{waited}; the limit is {LIMIT_SHARE:.0%} of loop.step_deadline_s={deadline_s:g}"
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (error, self._hashes))
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(outcomes) if error]
        if errors:
            raise _save_error(self.target, "; ".join(errors))
        self._hashes = {name: sha for _, hashes in outcomes for name, sha in hashes.items()}
        return [list(hashes) for _, hashes in outcomes]

    def _gather(self, names: Sequence[Sequence[str]]) -> None:
        try:
            gather_files(self._scratch, names, self._rank_info)
        except CheckpointError as error:
            raise _save_error(self.target, str(error)) from error

    def _publish(self, errors: Sequence[Exception]) -> None:
        if errors:
            raise errors[-1]
        rollout = self._hash_rollout_files() if self._rollout_files is None else self._rollout_files
        write_manifest(self._scratch, self._manifest, hashes=self._hashes, rollout=rollout)
        publish(self._scratch, self.target)

    def _hash_rollout_files(self) -> dict[str, FileRecord]:
        """Return sizes and hashes of the files that the driver wrote before this save began."""
        folder = self.target.parent
        return describe_files(folder / ROLLOUT, side_files(folder, self._manifest.iteration))


def begin_save(state: RankState, folder: Path, iteration: int, version: int) -> PendingSave:
    """Take a snapshot and start to write ``folder/iter_<iteration>``. Collective.

    Raises ``CheckpointError`` if a folder cannot be created or megatron cannot take the snapshot.
    """
    target = iteration_folder(folder, iteration)
    scratch = _scratch(target)
    on_rank_zero(lambda: make_empty(scratch))
    on_other_nodes(lambda: _replace_scratch(scratch), state.rank_info)
    sharded = sharded_state(state, loading=False)
    sharded["rng"] = rng_object(state.rank_info, rng_state())
    group = state.optimizer.param_groups[0]
    manifest = Manifest(
        iteration=iteration,
        version=version,
        schedule_steps=int(state.schedule.num_steps),
        max_lr=float(group["max_lr"]),
        min_lr=float(group["min_lr"]),
        distributed_optimizer=state.rank_info.layout.distributed_optimizer,
        layout=layout_sizes(state.rank_info),
        model=fingerprint(state.family, state.model.last.head),
    )
    try:
        request = dist_checkpointing.save(
            sharded,
            str(scratch),
            get_default_save_sharded_strategy("torch_dist"),
            async_sharded_save=True,
            async_strategy="mcore",
            content_metadata=content_metadata(),
        )
    except CheckpointException as error:
        raise _save_error(target, summarize_error(error)) from error
    return PendingSave(request, target, manifest, state.rank_info)


def _clone_live(buckets: list[Any], on_host: list[Any]) -> list[Any]:
    """Return ``on_host`` with a clone in place of each tensor that shares memory with the model or the optimizer.

    The next optimizer step overwrites this memory, and megatron makes host copies only of tensors on a device.
    """
    out: list[Any] = []
    for (_, _, (_, live)), (file, key, (data, tensors)) in zip(buckets, on_host, strict=True):
        pairs = zip(live, tensors, strict=True)
        copies = [
            (item, tensor.detach().clone() if tensor.data_ptr() == source.data_ptr() else tensor)
            for (_, source), (item, tensor) in pairs
        ]
        out.append((file, key, (data, copies)))
    return out


def _replace_scratch(scratch: Path) -> None:
    """Remove the scratch folders of interrupted saves on this node, and create an empty ``scratch``.

    Called on nodes that do not share rank 0's folder: the driver does not clean theirs.
    """
    for path in scratch.parent.glob(f"iter_*{SCRATCH}"):
        shutil.rmtree(path, ignore_errors=True)
    make_empty(scratch)


def _scratch(target: Path) -> Path:
    return target.with_name(target.name + SCRATCH)


def _save_error(target: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{target}: the save failed ({reason}); is the disk full or too slow? The previous checkpoint is unchanged"
    )
