"""Files of checkpoints, written in such an order that the tracker file never names an incomplete checkpoint. Torch-free.

    latest_checkpointed_iteration.txt    the tracker file: names the newest complete iteration, or "none"; replaced last
    iter_0000004/                        megatron's files and checkpoint.json: size and hash of each file, including
                                         rollout files, and the settings and inputs of the run that wrote them
    rollout/state_4.json                 the state of the rollout managers at the same iteration
    rollout/leftover_4.npz               groups carried over to the next rollout
    rollout/leftover_4_made_5.npz        rollout 5, if it was generated but not trained on (deterministic runs)
    rollout/leftover_4_in_flight.npz     unfinished groups, and prompts without a group
    *.tmp                                incomplete files of a save that is in progress or was killed

With several rollout managers, each has its own ``_made_`` and ``_in_flight`` files. Their names begin with
``leftover_4_manager_0``, where 0 is the number of the manager.

A folder gets its final name once everything in it is on the disk, and a file is replaced only by a finished one. The
iteration that the tracker file names is therefore complete at all times.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.errors import CheckpointError
from slime_like.util.reading import InputFile, abbreviate

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
NONE_YET = "none"  # instead of a number, from the start of the first save until it is complete
RELEASE = "release"  # instead of a number: megatron's word for converted weights
SCRATCH = ".tmp"
CRITIC = "critic"  # folder of a critic's iterations, inside its actor's folder
ROLLOUT = "rollout"
_NUMBER = re.compile(r"[0-9]{1,15}")


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Return megatron's folder of an iteration."""
    return folder / f"iter_{iteration:07d}"


def iterations(folder: Path) -> list[int]:
    """Return the iterations that have a folder, oldest first."""
    matches = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match[1]) for match in matches if match)


def latest_iteration(folder: Path) -> int:
    """Return the iteration that the tracker file of ``folder`` names.

    Raises ``CheckpointError`` if the file is missing, unreadable or holds no number.
    """
    iteration = resumable_iteration(folder)
    if iteration is None:
        state = "no iteration was complete when its run ended" if (folder / LATEST).exists() else "missing"
        raise CheckpointError(f"{folder / LATEST}: {state}; choose a folder with complete iter_* folders")
    return iteration


def resumable_iteration(folder: Path) -> int | None:
    """Return the iteration that a run in ``folder`` resumes from; None before the first save is complete.

    Raises ``CheckpointError`` if the tracker file is unreadable or holds no number, if it is missing although there are
    iterations, or if it says ``none`` although there are several iterations.
    """
    path, present = folder / LATEST, iterations(folder)
    if not path.exists():
        if present:
            raise _unnamed_error(folder, "missing", present)
        return None
    file = InputFile(path, CheckpointError, f"write the number of an iter_* folder of {folder} into it")
    text = file.text().strip()
    if text == NONE_YET:
        if len(present) > 1:  # an interrupted first save leaves at most one folder
            raise _unnamed_error(folder, f"says {NONE_YET}", present)
        return None
    if not _NUMBER.fullmatch(text):
        raise file.refused(f"says {abbreviate(text)}, which is not an iteration")
    return int(text)


def _unnamed_error(folder: Path, state: str, present: list[int]) -> CheckpointError:
    names = ", ".join(iteration_folder(folder, k).name for k in present[-3:])
    return CheckpointError(
        f"{folder / LATEST}: {state}, though {folder} contains {names}: write {present[-1]} into it to resume from there, or "
        "choose another run.dir to start over; nothing was changed"
    )


def begin_first(folder: Path) -> None:
    """Create the tracker file of ``folder``, with the word ``none``, unless it already exists.

    An interrupted first save is then not reported as a lost checkpoint.
    """
    if not (folder / LATEST).exists():
        write_text(folder / LATEST, NONE_YET)


def megatron_folder(folder: Path) -> Path | None:
    """Return ``folder`` if it contains megatron's files, else the folder that its tracker file names.

    Return None if there is no tracker file, or if the folder that it names lacks these files. Raises ``CheckpointError`` if
    the tracker file is unreadable or says neither a number nor ``release``.
    """
    if (folder / "metadata.json").is_file():
        return folder
    if not (folder / LATEST).is_file():
        return None
    is_release = InputFile(folder / LATEST, CheckpointError).text().strip() == RELEASE
    iteration_path = folder / RELEASE if is_release else iteration_folder(folder, latest_iteration(folder))
    return iteration_path if (iteration_path / "metadata.json").is_file() else None


def name_latest(folder: Path, iteration: int) -> None:
    """Write ``iteration``, which must be complete, to the tracker file, so that runs resume from it."""
    write_text(folder / LATEST, str(iteration))


def other_iterations(folder: Path) -> str:
    """Return a hint for an error message about the unusable iteration ``folder``: the iterations to use instead, if any."""
    alternatives = [k for k in iterations(folder.parent) if iteration_folder(folder.parent, k).name != folder.name]
    if not alternatives:
        return "there is no other iteration next to it: start over with another run.dir"
    return f"write another iteration ({', '.join(map(str, alternatives[-3:]))}) into {folder.parent / LATEST}"


def new_run_hint(folder: Path) -> str:
    """Return a hint for error messages about a run that cannot continue from the checkpoints in ``folder``."""
    critic = f" and critic.load={folder / CRITIC}" if (folder / CRITIC).is_dir() else ""
    return (
        "start a new run from the trained weights: choose another run.dir, remove run.resume, and set "
        f"model.megatron_checkpoint={folder}{critic}"
    )


# ---- writing ---------------------------------------------------------------------------------------------------------
@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a scratch path to write to. At the end of the block, the file there replaces ``path``.

    If the block raises an error, the incomplete file is removed first, to free its space on a disk that may be full. An
    ``OSError`` that names no file, as when a write fills the disk, gets the name of ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + SCRATCH)
    try:
        yield scratch
        scratch.replace(path)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, and wait until it is on the disk."""
    with replacing(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(scratch: Path, target: Path) -> None:
    """Rename the finished ``scratch`` to ``target`` once its content is on the disk. An earlier ``target`` is removed last."""
    for path in sorted(scratch.rglob("*")):
        fsync_path(path)
    fsync_path(scratch)
    replaced_path = target.with_name(f"{target.name}.replaced{SCRATCH}")
    if target.exists():
        _remove(replaced_path)  # left by a run that was killed before it removed an earlier target
        target.rename(replaced_path)
    scratch.rename(target)
    fsync_path(target.parent)
    shutil.rmtree(replaced_path, ignore_errors=True)


def side_files(folder: Path, iteration: int) -> list[str]:
    """Return the names of the files below ``folder/rollout`` that belong to ``iteration``."""
    return sorted(path.name for path in (folder / ROLLOUT).glob("*") if side_of(path) == iteration)


# ---- removing --------------------------------------------------------------------------------------------------------
def remove_scratch(folder: Path) -> None:
    """Remove leftovers of interrupted saves below ``folder``. No live run may be writing to it."""
    for path in sorted(folder.rglob(f"*{SCRATCH}")) if folder.is_dir() else ():
        _remove(path)


def prune(folder: Path, keep: int) -> None:
    """Remove old iterations. The iteration that the tracker file names stays, with the ``keep - 1`` before it.

    Later iterations stay too. The critic's folders and the rollout files are removed with their iteration. Rollout files
    of an earlier save that was never completed are removed too. Raises ``CheckpointError`` as ``latest_iteration`` does.
    """
    latest = latest_iteration(folder)
    outdated = [k for k in iterations(folder) if k <= latest][:-keep]
    kept_iterations = set(iterations(folder)) - set(outdated)
    sides = [(path, side_of(path)) for path in (folder / ROLLOUT).glob("*")]
    removals = [path for path, k in sides if k is not None and k <= latest and k not in kept_iterations]
    for iteration in outdated:
        removals += folder.rglob(iteration_folder(folder, iteration).name)
    for path in removals:
        # A partly removed folder must not have the name of a complete one.
        scratch = path.with_name(path.name + SCRATCH)
        _remove(scratch)  # left by an earlier removal that failed
        path.rename(scratch)
        _remove(scratch)


def side_of(path: Path) -> int | None:
    """Return the iteration in the name of a file of ``rollout/``; None if the file is not part of a checkpoint."""
    match = re.fullmatch(r"(?:state|leftover)_(\d+)(?:_manager_\d+)?(?:_made_\d+|_in_flight)?\.(?:json|npz)", path.name)
    return None if match is None else int(match[1])


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
