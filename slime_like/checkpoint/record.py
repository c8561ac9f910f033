"""The file checkpoint.json, which describes the other files of a checkpoint folder. Torch-free.

The other files are compared with it before they are loaded. Fields:

format                    version of the file's format
iteration, version, ...   fields of ``Manifest``
files, rollout            size and SHA-256 of every other file of the folder, and of this iteration's rollout files
run                       settings and inputs of the run (``cluster.start.identity``)
sha256                    SHA-256 of all of the above
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import (
    CRITIC,
    LATEST,
    MANIFEST,
    ROLLOUT,
    iteration_folder,
    iterations,
    latest_iteration,
    other_iterations,
    write_text,
)
from slime_like.checkpoint.hashes import FileRecord, changed_files, hash_files, text_hash
from slime_like.errors import CheckpointError
from slime_like.util.reading import Count, InputFile, abbreviate, reason

FORMAT = 2
FORMATS = (1, FORMAT)  # format 1 has sizes but neither hashes nor run
SEAL = "sha256"
Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Iteration, weight version, learning rates, layout and model of a checkpoint.

    A run that loads the checkpoint compares ``model`` with its own model, key by key, and restores the RNG states only if its
    own layout equals ``layout``.
    """

    iteration: Count
    version: Count
    schedule_steps: Count
    max_lr: float
    min_lr: float
    distributed_optimizer: bool
    layout: Mapping[str, Count]
    model: Mapping[str, Scalar]


# ---- writing ---------------------------------------------------------------------------------------------------------
def write_manifest(
    folder: Path,
    manifest: Manifest,
    *,
    hashes: Mapping[str, str] | None = None,
    rollout: Mapping[str, FileRecord] | None = None,
) -> None:
    """Write checkpoint.json into the finished ``folder``.

    ``hashes`` maps names of files to SHA-256 hashes that are already known; these files are not read again. ``rollout``
    describes the rollout files of the iteration, which are outside ``folder``.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    files = describe_files(folder, [name for name in names if name != MANIFEST], hashes or {})
    _write_values(
        folder / MANIFEST,
        {
            "format": FORMAT,
            **asdict(manifest),
            "files": {name: asdict(file) for name, file in files.items()},
            ROLLOUT: {name: asdict(file) for name, file in (rollout or {}).items()},
        },
    )


def add_run(folder: Path, run: Mapping[str, Any]) -> None:
    """Add the settings and inputs of the run to the checkpoint.json of ``folder``."""
    _, values = _read_values(folder / MANIFEST)
    _write_values(folder / MANIFEST, {**values, "run": run})


def describe_files(
    folder: Path, names: Sequence[str], hashes: Mapping[str, str] | None = None
) -> dict[str, FileRecord]:
    """Return the size and SHA-256 of the files ``names`` in ``folder``, by name. Files that ``hashes`` lacks are hashed."""
    digests = dict(hashes or {})
    unhashed_names = [name for name in names if name not in digests]
    digests |= zip(unhashed_names, hash_files([folder / name for name in unhashed_names]), strict=True)
    return {name: FileRecord((folder / name).stat().st_size, digests[name]) for name in names}


def _write_values(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps({**values, SEAL: _seal(values)}, indent=2) + "\n")


def _seal(values: Mapping[str, Any]) -> str:
    unsealed = {name: value for name, value in values.items() if name != SEAL}
    return text_hash(json.dumps(unsealed, sort_keys=True))


# ---- reading ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Contents of a checkpoint.json."""

    manifest: Manifest
    files: Mapping[str, FileRecord]
    rollout: Mapping[str, FileRecord]  # files of ../rollout; empty if not recorded
    run: Mapping[str, Any] | None  # settings and inputs (cluster.start.identity); None if not recorded
    hashed: bool  # False: written by a version that recorded only sizes

    @property
    def num_bytes(self) -> int:
        """Return the total size in bytes of the files that the record lists; checkpoint.json itself is not among them."""
        return sum(file.size for file in (*self.files.values(), *self.rollout.values()))


def read_manifest(folder: Path) -> Manifest:
    """Return the ``Manifest`` of ``folder``. Raises like ``read_record``."""
    return read_record(folder).manifest


def read_record(folder: Path) -> CheckpointRecord:
    """Return the record of ``folder`` after checking the size of each of its files.

    Raises ``CheckpointError`` if the folder is missing, if checkpoint.json is missing, damaged, in an unknown format or from
    another iteration, or if another file is missing, unreadable or of another size. The error names the folder or file.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: missing, though {folder.parent / LATEST} names it; {other_iterations(folder)}"
        )
    if not path.exists():
        raise CheckpointError(_without_manifest(folder))
    file, values = _read_values(path)
    record = _record(file, values)
    iteration = record.manifest.iteration
    if folder.name.startswith("iter_") and folder.name != iteration_folder(folder, iteration).name:
        raise file.refused(f"belongs to iteration {iteration}, not to {folder.name}")
    for name, file_record in record.files.items():
        _check_size(folder / name, file_record.size, folder)
    return record


def check_content(folder: Path, record: CheckpointRecord, names: Iterable[str], *, rollout: bool) -> None:
    """Compare the files ``names`` of ``folder`` and, if ``rollout``, the rollout files with the hashes in ``record``.

    Raises ``CheckpointError`` if files were changed (the message names at most four), or if one is missing or unreadable.
    """
    files = {name: record.files[name] for name in names}
    side = record.rollout if rollout else {}
    rollout_folder = folder.parent / ROLLOUT
    for name, file in side.items():
        _check_size(rollout_folder / name, file.size, folder)
    try:
        changed_paths = changed_files(folder, files) + changed_files(rollout_folder, side)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: cannot be read ({error.strerror}); {other_iterations(folder)}"
        ) from error
    if changed_paths:
        suffix = f" (and so are {', '.join(path.name for path in changed_paths[1:4])})" if changed_paths[1:] else ""
        raise CheckpointError(
            f"{changed_paths[0]}: changed since it was written: its SHA-256 is not the one in {MANIFEST}{suffix}; "
            f"{other_iterations(folder)}, or "
            "load it as it is with run.verify_checkpoint=size"
        )


def _read_values(path: Path) -> tuple[InputFile, dict[str, Any]]:
    file = InputFile(path, CheckpointError, other_iterations(path.parent))
    values = file.json_object()
    if (version := values.get("format")) not in FORMATS:
        raise CheckpointError(
            f"{path}: format {abbreviate(version)}, this version reads {FORMAT}; resume with the version that wrote it"
        )
    if version == FORMAT and values.get(SEAL) != _seal(values):
        raise CheckpointError(f"{path}: changed since it was written; {file.fix}")
    return file, values


def _record(file: InputFile, values: dict[str, Any]) -> CheckpointRecord:
    fields = {name: value for name, value in values.items() if name not in ("format", "files", ROLLOUT, "run", SEAL)}
    manifest = file.typed(fields, Manifest)
    if values["format"] == 1:
        sizes = file.typed(values.get("files"), dict[str, Count])
        return CheckpointRecord(
            manifest, {name: FileRecord(size) for name, size in sizes.items()}, {}, None, hashed=False
        )
    files, rollout = (file.typed(values.get(key), dict[str, FileRecord]) for key in ("files", ROLLOUT))
    run = None if values.get("run") is None else file.typed(values["run"], dict[str, Any])
    return CheckpointRecord(manifest, files, rollout, run, hashed=True)


def _check_size(path: Path, size: int, folder: Path) -> None:
    try:
        actual = path.stat().st_size
        if actual == size:
            path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in a damaged name
        raise CheckpointError(
            f"{path}: missing or not readable ({reason(error)}); {other_iterations(folder)}"
        ) from error
    if actual != size:
        raise CheckpointError(
            f"{path}: has the wrong size, {actual} bytes instead of {size}; {other_iterations(folder)}"
        )


def _without_manifest(folder: Path) -> str:
    if (folder / "metadata.json").is_file():
        return (
            f"{folder}: a Megatron checkpoint of another trainer (no {MANIFEST}), which cannot be resumed; "
            "start from its weights with model.megatron_checkpoint"
        )
    return f"{folder}: incomplete (no {MANIFEST}); {other_iterations(folder)}"


def critic_source(folder: Path) -> Path:
    """Return the critic's iteration folder: ``folder`` itself if it is one, otherwise an iteration in ``folder``.

    The iteration is the one that ``latest_iteration`` returns or, if there is no tracker file, the newest one. Raises
    ``CheckpointError`` like ``latest_iteration`` and ``read_record``, and also if there is no iteration or if the iteration
    belongs to an actor, which has no value head.
    """
    present = iterations(folder)
    if not (folder / MANIFEST).is_file() and present:
        newest = latest_iteration(folder) if (folder / LATEST).is_file() else present[-1]
        folder = iteration_folder(folder, newest)
    check_value_head(folder, read_manifest(folder))
    return folder


def check_value_head(folder: Path, manifest: Manifest) -> None:
    """Raise ``CheckpointError`` unless ``folder`` is a checkpoint of a critic."""
    if manifest.model.get("head") != "value":
        raise CheckpointError(
            f"{folder}: has no value head: it is an actor's checkpoint, not a critic's; set critic.load to the {CRITIC} folder "
            "of a run with algo=ppo, or to null for a new head on critic.hf_checkpoint"
        )
