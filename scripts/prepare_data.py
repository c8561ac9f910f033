"""Write public data sets as jsonl for ``data.train``: one object per line with ``prompt``, ``label`` and ``rm_type``.

python scripts/prepare_data.py gsm8k data          writes data/gsm8k/train.jsonl and test.jsonl
python scripts/prepare_data.py dapo-math-17k data --source folder       reads a local copy

The script needs the network unless ``--source`` names a folder that ``datasets.load_dataset`` can read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import replacing
from slime_like.printable import visible

GSM8K_HINT = "Let's think step by step and give the final answer after ####, in \\boxed{}."


class UnusableRow(Exception):
    """A row that lacks a part of its data set's format."""


@dataclass(frozen=True, slots=True)
class Format:
    """Location of a data set on the Hugging Face hub, and the format of its rows."""

    repository: str
    config: str | None
    splits: tuple[str, ...]
    convert: Callable[[Mapping[str, Any]], dict[str, Any]]


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row with ``question`` and ``answer``; the answer's text after the last ``####``, without commas, is the label.

    Raises ``UnusableRow`` if a field or ``####`` is missing.
    """
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
        raise UnusableRow("has no question, or no answer with '####'")
    label = answer.rpartition("####")[2].strip().replace(",", "")
    return {"prompt": f"{question}\n{GSM8K_HINT}", "label": label, "rm_type": "math"}


def with_label(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row with ``prompt`` (chat messages) and ``label``, the fields of slime's copies of data sets on the hub.

    Raises ``UnusableRow`` if a field is missing or the prompt is empty.
    """
    if not row.get("prompt") or row.get("label") is None:
        raise UnusableRow("has no prompt or no label")
    return {"prompt": row["prompt"], "label": str(row["label"]), "rm_type": "math"}


FORMATS = {
    "gsm8k": Format("openai/gsm8k", "main", ("train", "test"), gsm8k),
    "dapo-math-17k": Format("zhuzilin/dapo-math-17k", None, ("train",), with_label),
    "aime-2024": Format("zhuzilin/aime-2024", None, ("train",), with_label),
}


def convert(name: str, target: Path, source: str | None) -> list[Path]:
    """Write one jsonl file per split below ``target``; return the paths. Raises ``UnusableRow`` naming split and row."""
    from datasets import load_dataset

    form = FORMATS[name]
    written_files: list[Path] = []
    for split in form.splits:
        dataset: Any = load_dataset(source or form.repository, None if source else form.config, split=split)
        lines: list[str] = []
        for index, row in enumerate(dataset):
            try:
                lines.append(json.dumps(form.convert(row)) + "\n")
            except UnusableRow as error:
                raise UnusableRow(f"{name}, split {split}, row {index} {error}") from error
        path = target / name / f"{split}.jsonl"
        with replacing(path) as scratch:
            scratch.write_text("".join(lines))
        written_files.append(path)
    return written_files


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 1 if the data cannot be loaded or written, or is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(FORMATS))
    parser.add_argument("target", type=Path, help="folder to write to")
    parser.add_argument("--source", help="local folder in place of the hub's repository")
    args = parser.parse_args(argv)
    try:
        for path in convert(args.name, args.target, args.source):
            with path.open() as rows:
                sys.stdout.write(visible(f"{path}: {sum(1 for _ in rows)} rows\n"))
    except (UnusableRow, OSError, ValueError) as error:  # raised by datasets if something is missing or unreachable
        sys.stderr.write(visible(f"{args.name}: {error}\n"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
