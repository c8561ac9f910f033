"""What checkpoints are on disk, and the order of writing that keeps the newest whole one named whatever dies. No torch.

    latest_checkpointed_iteration.txt    names the newest whole iteration; replaced last
    iter_0000004/                        megatron's files, and checkpoint.json: what they are, and the size of each
    rollout/state_4.json                 the rollout side of the same instant;
    rollout/leftover_4[_made_5].npz      groups of it; leftover_4_in_flight.npz: those that were begun
    *.tmp                                not whole: of a save that is going on, or that died

A folder gets its name when everything in it is on the disk; a file is replaced by a finished one. So at every instant
the iteration that the latest file names is whole, as it was named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
SCRATCH = ".tmp"
CRITIC = "critic"  # folder of a critic's iterations, among those of its actor
FORMAT = 1
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is of. ``model`` and ``layout`` are compared key by key with those of the run that reads it."""

    iteration: int
    version: int
    schedule_steps: int
    max_lr: float
    min_lr: float
    distributed_optimizer: bool
    layout: Mapping[str, int]
    model: Mapping[str, Scalar]


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where megatron keeps an iteration."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """The iterations that have a folder, oldest first."""
    found = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def latest_iteration(folder: Path) -> int:
    """The iteration that ``folder``'s latest file names. Raises ``CheckpointError`` where there is none to be read."""
    path = folder / LATEST
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {folder} holds no finished checkpoint") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: must hold one iteration number ({error})") from error
    if not text.isdigit():
        raise CheckpointError(
            f"{path} says {text!r}, which is not an iteration: write the number of an iter_* folder beside it into it"
        )
    return int(text)


def megatron_folder(folder: Path) -> Path | None:
    """The folder with megatron's files that ``folder`` means: itself, or the one its latest file names; None: neither."""
    if (folder / "metadata.json").is_file():
        return folder
    if not (folder / LATEST).is_file():
        return None
    text = (folder / LATEST).read_text(encoding="utf-8").strip()
    found = iteration_folder(folder, int(text)) if text.isdigit() else folder / text  # "release": converted weights
    return found if (found / "metadata.json").is_file() else None


def name_latest(folder: Path, iteration: int) -> None:
    """Make ``iteration``, which is whole, the one that a run resumes from."""
    write_text(folder / LATEST, str(iteration))


# ---- writing ---------------------------------------------------------------------------------------------------------
def write_text(path: Path, text: str) -> None:
    """Replace the file by a finished one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + SCRATCH)
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(scratch: Path, target: Path) -> None:
    """Give a finished folder its name, once its content is on the disk. What had the name before is removed after."""
    for path in sorted(scratch.rglob("*")):
        sync(path)
    sync(scratch)
    aside = target.with_name(f"{target.name}.replaced{SCRATCH}")
    if target.exists():
        target.rename(aside)
    scratch.rename(target)
    sync(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Describe ``folder``, whose other files are all there."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(manifest), "files": files}, indent=2) + "\n")


# ---- reading ---------------------------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> Manifest:
    """What ``folder`` holds, after a look at the size of every file of it.

    Raises ``CheckpointError`` naming the folder or file that is missing, cut short, garbled or of another format.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: missing, though {folder.parent / LATEST} names it; {_fix(folder)}")
    try:
        values = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        if (found := values.pop("format")) != FORMAT:
            raise CheckpointError(
                f"{path}: format {found!r}, this version reads {FORMAT}; resume with the version that wrote it"
            )
        sizes = {str(name): int(size) for name, size in values.pop("files").items()}
        manifest = Manifest(**values)
    except FileNotFoundError:
        raise CheckpointError(_not_ours(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: garbled ({type(error).__name__}: {error}); {_fix(folder)}") from error
    for name, size in sizes.items():
        _check_size(folder / name, size)
    return manifest


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: missing ({error.strerror}); {_fix(path.parent)}") from error
    if found != size:
        raise CheckpointError(f"{path}: torn, {found} bytes where {size} were written; {_fix(path.parent)}")


def _not_ours(folder: Path) -> str:
    if (folder / "metadata.json").is_file():
        return (
            f"{folder}: a Megatron checkpoint of another trainer (no {MANIFEST}), which cannot be resumed; "
            "start from its weights with model.megatron_checkpoint"
        )
    return f"{folder}: incomplete (no {MANIFEST}); {_fix(folder)}"


def _fix(folder: Path) -> str:
    others = [k for k in iterations(folder.parent) if iteration_folder(folder.parent, k).name != folder.name]
    if not others:
        return "there is no other iteration beside it: start anew with another run.dir"
    return f"write an earlier iteration ({', '.join(map(str, others[-3:]))}) into {folder.parent / LATEST}"


def critic_source(folder: Path) -> Path:
    """The iteration of a critic that ``folder`` is, or the newest one that it holds.

    Raises ``CheckpointError`` where there is none, or where it is not a critic's: an actor's has no value head.
    """
    found = iterations(folder)
    if not (folder / MANIFEST).is_file() and found:
        newest = latest_iteration(folder) if (folder / LATEST).is_file() else found[-1]
        folder = iteration_folder(folder, newest)
    check_value_head(folder, read_manifest(folder))
    return folder


def check_value_head(folder: Path, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless ``folder`` is a critic's."""
    if manifest.model.get("head") != "value":
        raise CheckpointError(
            f"{folder}: holds no value head, as it is an actor's and not a critic's; give critic.load the {CRITIC} folder "
            "of a run with algo=ppo, or null for a fresh head on critic.hf_checkpoint"
        )


# ---- removing --------------------------------------------------------------------------------------------------------
def remove_scratch(folder: Path) -> None:
    """Remove what saves that died left in ``folder`` and below. Only for a folder that no living run writes to."""
    for path in sorted(folder.rglob(f"*{SCRATCH}")) if folder.is_dir() else ():
        _remove(path)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` iterations, and never the one that the latest file names.

    The rollout side goes with its iteration; so does that of an iteration whose save failed.
    """
    latest = latest_iteration(folder)
    old = [k for k in iterations(folder) if k <= latest][:-keep]
    kept = set(iterations(folder)) - set(old)
    sides = [(path, side_of(path)) for path in (folder / "rollout").glob("*")]
    gone = [path for path, k in sides if k is not None and k <= latest and k not in kept]
    for iteration in old:
        gone += folder.rglob(iteration_folder(folder, iteration).name)
    for path in gone:
        aside = path.with_name(path.name + SCRATCH)  # half removed, it must not have the name of a whole one
        path.rename(aside)
        _remove(aside)


def side_of(path: Path) -> int | None:
    """The iteration that a file of ``rollout/`` belongs to: the first number of its name. None: not of a checkpoint."""
    found = re.fullmatch(r"(?:state|leftover)_(\d+)(?:_made_\d+|_in_flight)?\.(?:json|npz)", path.name)
    return None if found is None else int(found[1])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
