"""Mapping of one line of slime flags."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_like.config.schema.root import TrainConfig
from slime_like_compat.conversion_rows import Mapped, Row
from slime_like_compat.shell.launch_script import read_launch
from slime_like_compat.slime.mapping import map_arguments

NEEDED = (
    "--hf-checkpoint m --prompt-data d.jsonl --num-rollout 10 --rollout-batch-size 8 --n-samples-per-prompt 4 "
    "--attention-dropout 0.0 --hidden-dropout 0.0"
)


def mapped(folder: Path, line: str, *, asynchronous: bool = False, drop: Sequence[str] = ()) -> Mapped:
    script = folder / "run.sh"
    script.write_text(f"python3 train.py {NEEDED} \\\n {line}")
    return map_arguments(
        read_launch(script, variables={}).arguments, run_name="a", asynchronous=asynchronous, drop=drop
    )


def composed(folder: Path, line: str, **options: Any) -> TrainConfig:
    """Return the configuration of a job that converts."""
    job = mapped(folder, line, **options)
    assert job.config is not None, job.blocked
    return job.config


def row(job: Mapped, flag: str) -> Row:
    return next(row for row in reversed(job.rows) if row.flag == flag)
