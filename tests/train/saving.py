"""Rank functions of test_saving: save while training, on disks that die or are full; and read what is left."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import resource
import shutil
import threading
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
from tests.train.jobs import Shared, make_actor
from tests.train.lifecycle import digest, train
from tests.train.ranks import World


@functools.cache
def disk() -> Disk:
    """This process's one."""
    return Disk()


def _checkpoints(run_dir: Path, actor: Any, last: int, **run: Any) -> Any:
    """The driver's side of saving, over the ranks' side in the same process."""
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


# ---- beside training -------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def held_writers() -> Generator[threading.Event]:
    """Threads that write checkpoints wait until the event is set."""
    from slime_like.train.megatron.model_io.checkpoint import PendingSave

    go = threading.Event()
    write = PendingSave._write

    def held(self: PendingSave, *args: Any) -> None:
        assert go.wait(60)
        write(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingSave, "_write", held)
        yield go


@contextlib.contextmanager
def hashing_threads() -> Generator[set[str]]:
    """Names of the threads in which the files that a rank wrote are read again."""
    from slime_like.train.megatron.model_io import checkpoint

    names: set[str] = set()

    def hash_files(paths: list[Path]) -> list[str]:
        names.add(threading.current_thread().name)
        return stock(paths)

    stock = checkpoint.hash_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "hash_files", hash_files)
        yield names


def save_beside_training(world: World, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Begin a save, train, and only then let the last rank write."""
    from slime_like.checkpoint.record import read_record

    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    train(actor, layout, 1)
    saved, version = digest(actor), actor.version
    with held_writers() as go, hashing_threads() as hashed_by:
        if world.rank < world.size - 1:
            go.set()
        actor.begin_save(shared.scratch, 1)
        train(actor, layout, 2)
        early = actor.finish_save(wait=False)
        seen = sorted(path.name for path in shared.scratch.iterdir())
        go.set()
        late = actor.finish_save(wait=True)
    record = read_record(shared.scratch / "iter_0000001")
    resumed = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    resumed.load(shared.scratch, 1)
    again = resumed.version
    resumed_digest = digest(resumed)
    train(resumed, layout, 2)
    return {
        "early": early,
        "seen": seen,
        "late": late,
        "hashed": all(file.sha256 for file in record.files.values()) and len(record.files) > world.size,
        "hashed by": sorted(hashed_by),
        "loaded": resumed_digest == saved and again == version,
        "goes on": digest(resumed) == digest(actor),
    }


# ---- dying -----------------------------------------------------------------------------------------------------------
def die_everywhere(world: World, shared: Shared) -> dict[str, Any]:
    """Save iteration 2 over and over, each time dying one operation later; what a resume then finds, point by point."""
    from slime_like.checkpoint.files import iteration_folder, latest_iteration
    from slime_like.checkpoint.record import read_manifest
    from slime_like.cluster.run.checkpoints import remove_leftovers
    from slime_like.cluster.run.rollouts import read_state

    base, run_dir = shared.scratch / "base", shared.scratch / "run"
    actor = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig())
    expected: dict[int, str] = {}
    for iteration in (1, 2):
        train(actor, Layout(), iteration)
        expected[iteration] = digest(actor)
        if iteration == 1:
            _checkpoints(base, actor, 0).save(1, final=True)
    found: list[int] = []
    unproven: dict[str, Path] = {}
    finished = False
    while not finished:
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(base, run_dir)
        checkpoints = _checkpoints(run_dir, actor, 1, keep_checkpoints=1)
        with disk().watching(run_dir, dies_before=len(found)):
            try:
                checkpoints.save(2, final=True)
                finished = True
            except (Killed, CheckpointError):
                actor._pending = None  # the process is gone
        remove_leftovers(run_dir)
        folder = run_dir / "checkpoints"
        found.append(latest_iteration(folder))
        source = iteration_folder(folder, found[-1])
        read_manifest(source)
        assert read_state(folder, found[-1]) == {"cursor": {"at": found[-1]}}
        assert not list(run_dir.rglob("*.tmp"))
        key = f"{found[-1]} {_bytes(source)}"
        if key not in unproven:
            unproven[key] = Path(shutil.copytree(source, shared.scratch / f"proof{len(unproven)}" / source.name))
    for key, copy in unproven.items():
        iteration = int(key.split()[0])
        actor.load(copy.parent, iteration)
        assert digest(actor) == expected[iteration], f"{copy}: other weights than those that were saved"
    return {"found": found, "operations": disk().operations, "read": len(unproven)}


def _bytes(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()


# ---- full disks ------------------------------------------------------------------------------------------------------
FULL = ("iter_0000002.tmp", ".metadata.tmp", "metadata.json", "checkpoint.json.tmp")


def full_disks(world: World, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Saves on a disk that is full at one point of one rank, then one that goes well; what each says and leaves."""
    from slime_like.checkpoint.files import latest_iteration
    from slime_like.checkpoint.record import read_manifest

    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    folder = shared.scratch / "checkpoints"
    train(actor, layout, 1)
    saved = digest(actor)
    actor.save(folder, 1)
    train(actor, layout, 2)
    out: dict[str, Any] = {}
    for name in FULL:
        with disk().watching(folder, full_at=name if world.rank == 0 else None):
            out[name] = _refused(actor, folder)
    with small_files(20_000 if world.rank == world.size - 1 else None):
        out["shard"] = _refused(actor, folder)
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    actor.save(folder, 3)  # the run may go on
    resumed = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    resumed.load(folder, 1)
    read_manifest(folder / "iter_0000003")
    return {"errors": out, "left": left, "first is whole": digest(resumed) == saved, "latest": latest_iteration(folder)}


def _refused(actor: Any, folder: Path) -> str:
    try:
        actor.begin_save(folder, 2)
        actor.finish_save(wait=True)
    except CheckpointError as error:
        return str(error)
    return "no error"


@contextlib.contextmanager
def small_files(size: int | None) -> Generator[None]:
    """The kernel refuses to let a file of this process grow above ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disk_of_a_run(world: World, shared: Shared) -> dict[str, Any]:
    """The driver's side on a full disk: stop, go on, and never go on at the end of a run."""
    actor = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig())
    out: dict[str, Any] = {}
    for name, final in (("stop", False), ("continue", False), ("continue", True)):
        run_dir = shared.scratch / f"{name}{final}"
        checkpoints = _checkpoints(run_dir, actor, 0, on_failed_save=name)
        checkpoints.save(1, final=True)
        seen = "raised nothing"
        try:
            with small_files(20_000):
                checkpoints.save(2, final=final)
                checkpoints.save(2)  # which waits for the one before
        except CheckpointError as error:
            seen = str(error)
        with disk().watching(run_dir, full_at="state_2.json.tmp"):
            try:
                checkpoints.save(2)
            except CheckpointError as error:
                out[f"rollout side, {name} {final}"] = str(error)
        checkpoints.save(3, final=True)
        latest = (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
        out[f"{name} {final}"] = (seen, latest)
    return out


EXPORT_FULL = ("hf.tmp", "hf.tmp/config.json", "hf.tmp/model.safetensors.index.json")


def full_disks_of_exports(world: World, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Exports over an earlier one, on a disk that is full at one point of one rank, then one that goes well."""
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
    left, kept = sorted(path.name for path in shared.scratch.iterdir()), _bytes(folder)
    dist.barrier()
    with disk().watching(shared.scratch) as operations:
        actor.export_hf(folder)
    dist.barrier()
    return {
        "errors": out,
        "left": left,
        "kept": kept == before,
        "then": _bytes(folder) != before,
        "files": sorted(path.name for path in folder.iterdir()),
        "operations": list(operations),
    }


def _not_exported(actor: Any, folder: Path) -> str:
    try:
        actor.export_hf(folder)
    except CheckpointError as error:
        return str(error)
    return "no error"
