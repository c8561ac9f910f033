"""Rank functions of test_saving: saves during training, saves that are killed, and saves on full disks."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import io
import queue
import resource
import shutil
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.config.schema.run import RunConfig
from slime_like.errors import CheckpointError
from tests.train.disk import Disk, Killed
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.lifecycle import digest, train
from tests.train.ranks import RankWorld


@functools.cache
def disk() -> Disk:
    """Return the recorder of this process, of which there can be only one."""
    return Disk()


def _checkpoints(run_dir: Path, actor: Any, last: int, **run: Any) -> Any:
    """Return the driver's ``Checkpoints``, with ``actor``, a rank of this process, as its trainer."""
    from slime_like.cluster.run.checkpoints import Checkpoints
    from slime_like.cluster.run.rollouts import DemonstrationRollout

    source: Any = SimpleNamespace(state=lambda: {"at": actor.version})
    return Checkpoints(
        folder=run_dir / "checkpoints",
        trainer=actor,
        rollout=DemonstrationRollout(source, 1),
        config=RunConfig(dir=str(run_dir), **run),
        enabled=True,
        last=last,
        run={"config": {"loop": {"num_rollout": 2}}},
    )


# ---- during training -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def waiting_writers() -> Generator[threading.Event]:
    """Make the threads that write checkpoints wait until the event is set."""
    from slime_like.train.megatron.model_io.save import PendingSave

    release = threading.Event()
    write = PendingSave._write_files

    def write_after_release(self: PendingSave, *args: Any) -> None:
        assert release.wait(60)
        write(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingSave, "_write_files", write_after_release)
        yield release


@contextlib.contextmanager
def hashing_threads() -> Generator[set[str]]:
    """Yield the names of the threads that hash the files written by this rank."""
    from slime_like.train.megatron.model_io import save

    names: set[str] = set()

    def hash_files(paths: list[Path]) -> list[str]:
        names.add(threading.current_thread().name)
        return stock(paths)

    stock = save.hash_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "hash_files", hash_files)
        yield names


def save_during_training(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Begin a save, train, and then let the last rank write."""
    from slime_like.checkpoint.record import read_record

    actor = make_actor(world, shared.models["one layer"], layout, algo=SftConfig())
    train(actor, layout, 1)
    saved_digest, version = digest(actor), actor.version
    with waiting_writers() as release, hashing_threads() as hashed_by:
        if world.rank < world.size - 1:
            release.set()
        actor.begin_save(shared.scratch, 1)
        train(actor, layout, 2)
        is_complete_early = actor.finish_save(wait=False)
        files = sorted(path.name for path in shared.scratch.iterdir())
        release.set()
        is_complete = actor.finish_save(wait=True)
    record = read_record(shared.scratch / "iter_0000001")
    resumed = make_actor(world, shared.models["one layer"], layout, algo=SftConfig())
    resumed.load(shared.scratch, 1)
    version_loaded = resumed.version
    resumed_digest = digest(resumed)
    train(resumed, layout, 2)
    return {
        "complete early": is_complete_early,
        "files": files,
        "complete": is_complete,
        "hashed": all(file.sha256 for file in record.files.values()) and len(record.files) > world.size,
        "hashed by": sorted(hashed_by),
        "loaded": resumed_digest == saved_digest and version_loaded == version,
        "continues": digest(resumed) == digest(actor),
    }


# ---- killed saves ----------------------------------------------------------------------------------------------------
def kill_at_every_operation(world: RankWorld, shared: Shared) -> dict[str, Any]:
    """Save iteration 2 repeatedly, each time killed one operation later. Return the iterations that resumes read."""
    from slime_like.checkpoint.files import iteration_folder, latest_iteration
    from slime_like.checkpoint.record import read_manifest
    from slime_like.cluster.run.checkpoints import remove_leftovers
    from slime_like.cluster.run.rollout_state import read_state

    base, run_dir = shared.scratch / "base", shared.scratch / "run"
    actor = make_actor(world, shared.models["one layer"], Layout(), algo=SftConfig())
    expected: dict[int, str] = {}
    for iteration in (1, 2):
        train(actor, Layout(), iteration)
        expected[iteration] = digest(actor)
        if iteration == 1:
            _checkpoints(base, actor, 0).save(1, final=True)
    iterations: list[int] = []
    unread: dict[str, Path] = {}  # iteration and hash -> copy of the checkpoint
    is_complete = False
    while not is_complete:
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(base, run_dir)
        checkpoints = _checkpoints(run_dir, actor, 1, keep_checkpoints=1)
        with disk().watching(run_dir, dies_before=len(iterations)):
            try:
                checkpoints.save(2, final=True)
                is_complete = True
            except (Killed, CheckpointError):
                actor._pending_save = None  # as in a new process
        remove_leftovers(run_dir)
        folder = run_dir / "checkpoints"
        iterations.append(latest_iteration(folder))
        source = iteration_folder(folder, iterations[-1])
        read_manifest(source)
        assert read_state(folder, iterations[-1]) == {"cursor": {"at": iterations[-1]}}
        assert not list(run_dir.rglob("*.tmp"))
        key = f"{iterations[-1]} {_bytes(source)}"
        if key not in unread:
            unread[key] = Path(shutil.copytree(source, shared.scratch / f"copy{len(unread)}" / source.name))
    for key, copy in unread.items():
        iteration = int(key.split()[0])
        actor.load(copy.parent, iteration)
        assert digest(actor) == expected[iteration], f"{copy}: not the weights that were saved"
    return {"iterations": iterations, "operations": disk().operations, "num_read": len(unread)}


def _bytes(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()


# ---- full disks ------------------------------------------------------------------------------------------------------
FULL = ("iter_0000002.tmp", ".metadata.tmp", "metadata.json", "checkpoint.json.tmp")


def full_disks(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Save on a disk that is full at one operation of one rank, then on one with space. Return errors and files."""
    from slime_like.checkpoint.files import latest_iteration
    from slime_like.checkpoint.record import read_manifest

    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    folder = shared.scratch / "checkpoints"
    train(actor, layout, 1)
    saved_digest = digest(actor)
    save_checkpoint(actor, folder, 1)
    train(actor, layout, 2)
    out: dict[str, Any] = {}
    for name in FULL:
        with disk().watching(folder, full_at=name if world.rank == 0 else None):
            out[name] = _save_error(actor, folder)
    with small_files(20_000 if world.rank == world.size - 1 else None):
        out["shard"] = _save_error(actor, folder)
    dist.barrier()
    files = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    save_checkpoint(actor, folder, 3)  # the run can continue
    resumed = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    resumed.load(folder, 1)
    read_manifest(folder / "iter_0000003")
    return {
        "errors": out,
        "files": files,
        "first is intact": digest(resumed) == saved_digest,
        "latest": latest_iteration(folder),
    }


def _save_error(actor: Any, folder: Path) -> str:
    """Return the message with which a save of step 2 fails."""
    try:
        actor.begin_save(folder, 2)
        actor.finish_save(wait=True)
    except CheckpointError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def small_files(size: int | None) -> Generator[None]:
    """Limit files of this process to ``size`` bytes; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def slow_disk(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Save while the last rank's disk does not answer, then again. Return the error, its time, files and iterations."""
    from slime_like.checkpoint.files import latest_iteration

    actor = make_actor(world, shared.models["one layer"], layout, algo=SftConfig())
    folder = shared.scratch / "checkpoints"
    train(actor, layout, 1)
    save_checkpoint(actor, folder, 1)
    train(actor, layout, 2)
    message = "no error"
    with waiting_writers() as release:
        if world.rank < world.size - 1:
            release.set()
        actor.begin_save(folder, 2)
        pending, actor._pending_save = actor._pending_save, None
        assert pending is not None
        start = time.monotonic()
        try:
            pending.finish(1.0)
        except CheckpointError as error:
            message = str(error)
        seconds = time.monotonic() - start
        dist.barrier()
        files = sorted(path.name for path in folder.iterdir())
        dist.barrier()
        release.set()  # the thread of a save that failed writes nothing more
        save_checkpoint(actor, folder, 2)
    return {"error": message, "seconds": seconds, "files": files, "latest": latest_iteration(folder)}


def failed_write(world: RankWorld, shared: Shared) -> dict[str, Any]:
    """Write an object to a full disk while garbage collection is off. Return the error, and if the object is freed."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    from slime_like.train.megatron.model_io.save import PendingSave

    data = io.BytesIO(bytes(100_000))
    item = WriteItem(MetadataIndex("object"), WriteItemType.BYTE_IO)
    buckets = [("/dev/full", "full", ([(item, data)], []))]
    write = functools.partial(
        FileSystemWriterAsync.write_preloaded_data_multithread, [_StorageWriterTransforms()], False
    )
    request = SimpleNamespace(
        finalize_fns=[],
        async_fn=write,
        async_fn_args=[0, buckets, queue.Queue()],
        async_fn_kwargs={},
        preload_fn=lambda buckets=buckets: buckets,
    )
    unused: Any = None
    gc.disable()
    try:
        save = PendingSave(request, shared.scratch / "iter_0000001", unused, unused)
        assert save._thread is not None
        save._thread.join(60)
        freed = weakref.ref(data)
        del data, buckets, request
        return {"error": save._error, "freed": freed() is None}
    finally:
        gc.enable()


def full_disk_of_a_run(world: RankWorld, shared: Shared) -> dict[str, Any]:
    """Save from the driver on a full disk: stop or continue as configured, but always stop at the end of a run."""
    actor = make_actor(world, shared.models["one layer"], Layout(), algo=SftConfig())
    out: dict[str, Any] = {}
    for name, final in (("stop", False), ("continue", False), ("continue", True)):
        run_dir = shared.scratch / f"{name}{final}"
        checkpoints = _checkpoints(run_dir, actor, 0, on_failed_save=name)
        checkpoints.save(1, final=True)
        message = "no error"
        try:
            with small_files(20_000):
                checkpoints.save(2, final=final)
                checkpoints.save(2)  # waits for the previous save
        except CheckpointError as error:
            message = str(error)
        with disk().watching(run_dir, full_at="state_2.json.tmp"):
            try:
                checkpoints.save(2)
            except CheckpointError as error:
                out[f"rollout state, {name} {final}"] = str(error)
        checkpoints.save(3, final=True)
        latest = (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
        out[f"{name} {final}"] = (message, latest)
    return out


EXPORT_FULL = ("hf.tmp", "hf.tmp/config.json", "hf.tmp/model.safetensors.index.json")


def full_disks_of_exports(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Replace an export on a disk that is full at one operation of one rank, and then on a disk with space."""
    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    folder = shared.scratch / "hf"
    actor.export_hf(folder)
    dist.barrier()
    before = _bytes(folder)
    dist.barrier()
    train(actor, layout, 1)
    out: dict[str, Any] = {}
    for name in EXPORT_FULL:
        with disk().watching(shared.scratch, full_at=name if world.rank == 0 else None):
            out[name] = _not_exported(actor, folder)
    with small_files(20_000 if world.rank == world.size - 1 else None):
        out["shard"] = _not_exported(actor, folder)
    dist.barrier()
    files, digest_after = sorted(path.name for path in shared.scratch.iterdir()), _bytes(folder)
    dist.barrier()
    with disk().watching(shared.scratch) as operations:
        actor.export_hf(folder)
    dist.barrier()
    return {
        "errors": out,
        "remaining": files,
        "unchanged": digest_after == before,
        "replaced": _bytes(folder) != before,
        "files": sorted(path.name for path in folder.iterdir()),
        "operations": list(operations),
    }


def _not_exported(actor: Any, folder: Path) -> str:
    try:
        actor.export_hf(folder)
    except CheckpointError as error:
        return str(error)
    return "no error"
