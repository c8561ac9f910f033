"""Verify checkpoints before a run reads them, against the hashes recorded by the save (``run.verify_checkpoint``)."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_like.checkpoint.files import MANIFEST, megatron_folder
from slime_like.checkpoint.record import CheckpointRecord, check_content, critic_source, read_record
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.printable import visible

SLOW_BYTES = 8e9  # the comparison of larger checkpoints is announced
SMALL_BYTES = 1 << 26


def verify(cfg: TrainConfig, folder: Path, record: CheckpointRecord) -> None:
    """Compare the files of a checkpoint with their recorded hashes, or warn if none are recorded.

    Do nothing unless ``run.verify_checkpoint=full``. With several trainer nodes, this process hashes only the rollout files
    and the files below ``SMALL_BYTES``; the ranks hash all files but the rollout files in parallel, each file once. Raises
    ``CheckpointError`` if files have changed (it names at most four), or if one is missing or cannot be read.
    """
    if cfg.run.verify_checkpoint != "full":
        return
    if not record.hashed:
        sys.stderr.write(
            visible(
                f"warning: {folder}: written by a version that recorded no hashes; only the sizes of its files are checked\n"
            )
        )
        return
    names = [name for name, file in record.files.items() if not on_ranks(cfg) or file.size < SMALL_BYTES]
    if not on_ranks(cfg) and record.num_bytes > SLOW_BYTES:
        sys.stdout.write(
            visible(
                f"{folder}: comparing {record.num_bytes / 1e9:.0f} GB with their hashes (run.verify_checkpoint=size does not)\n"
            )
        )
        sys.stdout.flush()
    check_content(folder, record, names, rollout=True)


def on_ranks(cfg: TrainConfig) -> bool:
    """Return True if the trainer's ranks, not the driver, compare a checkpoint's large files with the recorded hashes."""
    return cfg.run.verify_checkpoint == "full" and cfg.placement.actor_num_nodes > 1


def verify_initial_checkpoints(cfg: TrainConfig) -> None:
    """Call ``verify`` on the checkpoints from which the run loads initial weights, except those that other programs wrote."""
    paths = [cfg.model.megatron_checkpoint, cfg.model.ref_checkpoint, cfg.teacher.hf_checkpoint]
    sources = [megatron_folder(Path(path)) for path in paths if path is not None]
    if isinstance(cfg.algo, PpoConfig) and cfg.critic.load is not None:
        sources.append(critic_source(Path(cfg.critic.load)))
    for source in dict.fromkeys(sources):
        if source is not None and (source / MANIFEST).is_file():
            verify(cfg, source, read_record(source))
