"""Responses of an evaluation on disk: one file per evaluation, one JSON object per response.

``pandas.read_json("RUN/eval/step_0000010.jsonl", lines=True)`` reads one such file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import write_text
from slime_like.rollout.generate.evaluate import EvalAnswer


def answers_path(run_dir: Path, num_trained: int) -> Path:
    """Return the path of the file for the evaluation after ``num_trained`` rollouts."""
    return run_dir / "eval" / f"step_{num_trained:07d}.jsonl"


def write_answers(path: Path, num_trained: int, answers: Sequence[EvalAnswer]) -> None:
    """Write ``answers`` with a column ``step``, atomically. A resumed run overwrites the files of steps that it repeats."""
    rows = [{"step": num_trained, **asdict(answer)} for answer in answers]
    write_text(
        path, "".join(json.dumps({name: _readable(value) for name, value in row.items()}) + "\n" for row in rows)
    )


def _readable(value: Any) -> Any:
    """Return ``value`` with lone surrogates replaced: data files may contain them, but JSON readers reject them."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
