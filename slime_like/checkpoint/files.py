"""What checkpoints are on disk, and the order of writing that keeps the newest whole one named whatever dies. No torch.

    latest_checkpointed_iteration.txt    names the newest whole iteration; replaced last; none until the first is whole
    iter_0000004/                        megatron's files, and checkpoint.json: size and hash of each, of the rollout side's, and
                                         the settings and inputs of the run that wrote them
    rollout/state_4.json                 the rollout side of the same instant;
    rollout/leftover_4[_made_5].npz      groups of it; leftover_4_in_flight.npz: those that were begun
    *.tmp                                not whole: of a save that is going on, or that died

A folder gets its name when everything in it is on the disk; a file is replaced by a finished one. So at every instant
the iteration that the latest file names is whole, as it was named.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from slime_like.errors import CheckpointError
from slime_like.util.reading import InputFile, shown

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
NONE_YET = "none"  # in the place of an iteration, from the beginning of a first save until it is whole
RELEASE = "release"  # in the place of an iteration: megatron's word for converted weights
SCRATCH = ".tmp"
CRITIC = "critic"  # folder of a critic's iterations, among those of its actor
ROLLOUT = "rollout"
_NUMBER = re.compile(r"[0-9]{1,15}")


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where megatron keeps an iteration."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """The iterations that have a folder, oldest first."""
    found = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in found if match)


def latest_iteration(folder: Path) -> int:
    """Return the iteration that ``folder``'s latest file names. Raises ``CheckpointError`` where it names none."""
    iteration = resumable_iteration(folder)
    if iteration is None:
        state = "no iteration was whole when its run ended" if (folder / LATEST).exists() else "missing"
        raise CheckpointError(f"{folder / LATEST}: {state}; give a folder that holds whole iter_* folders")
    return iteration


def resumable_iteration(folder: Path) -> int | None:
    """Return the iteration that a run in ``folder`` resumes from; None where the run has yet to complete its first save.

    Raises ``CheckpointError`` where the latest file cannot be read, or is lost while iterations are there.
    """
    path, present = folder / LATEST, iterations(folder)
    if not path.exists():
        if present:
            raise _unnamed(folder, "missing", present)
        return None
    file = InputFile(path, CheckpointError, f"write the number of an iter_* folder of {folder} into it")
    text = file.text().strip()
    if text == NONE_YET:
        if len(present) > 1:  # a first save that was cut leaves one folder at most
            raise _unnamed(folder, f"says {NONE_YET}", present)
        return None
    if not _NUMBER.fullmatch(text):
        raise file.refused(f"says {shown(text)}, which is not an iteration")
    return int(text)


def _unnamed(folder: Path, state: str, present: list[int]) -> CheckpointError:
    names = ", ".join(iteration_folder(folder, k).name for k in present[-3:])
    return CheckpointError(
        f"{folder / LATEST}: {state}, though {folder} holds {names}: write {present[-1]} into it to resume from there, or "
        "choose another run.dir to start over; nothing was changed"
    )


def begin_first(folder: Path) -> None:
    """Record that a first save begins, so that an iteration which is never named is not taken for a lost latest file."""
    if not (folder / LATEST).exists():
        write_text(folder / LATEST, NONE_YET)


def megatron_folder(folder: Path) -> Path | None:
    """The folder with megatron's files that ``folder`` means: itself, or the one its latest file names; None: neither."""
    if (folder / "metadata.json").is_file():
        return folder
    if not (folder / LATEST).is_file():
        return None
    released = InputFile(folder / LATEST, CheckpointError).text().strip() == RELEASE
    found = folder / RELEASE if released else iteration_folder(folder, latest_iteration(folder))
    return found if (found / "metadata.json").is_file() else None


def name_latest(folder: Path, iteration: int) -> None:
    """Make ``iteration``, which is whole, the one that a run resumes from."""
    write_text(folder / LATEST, str(iteration))


def other_iterations(folder: Path) -> str:
    """Return the fix where ``folder``, an iteration, cannot be used: the iterations beside it."""
    others = [k for k in iterations(folder.parent) if iteration_folder(folder.parent, k).name != folder.name]
    if not others:
        return "there is no other iteration beside it: start over with another run.dir"
    return f"write an earlier iteration ({', '.join(map(str, others[-3:]))}) into {folder.parent / LATEST}"


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


def side_files(folder: Path, iteration: int) -> list[str]:
    """Return the names of the files below ``folder/rollout`` that belong to ``iteration``."""
    return sorted(path.name for path in (folder / ROLLOUT).glob("*") if side_of(path) == iteration)


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
    sides = [(path, side_of(path)) for path in (folder / ROLLOUT).glob("*")]
    gone = [path for path, k in sides if k is not None and k <= latest and k not in kept]
    for iteration in old:
        gone += folder.rglob(iteration_folder(folder, iteration).name)
    for path in gone:
        aside = path.with_name(path.name + SCRATCH)  # half removed, it must not have the name of a whole one
        _remove(aside)  # of a removal that failed in part
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
