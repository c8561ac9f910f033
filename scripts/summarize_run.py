"""Print the first and last held-out accuracy of a finished run. scripts/quickstart.sh calls it.

python scripts/summarize_run.py [overrides and flags with which train.py started the run]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slime_like.config.load.loader import load_config
from slime_like.errors import SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like_compat.flags.translate import translate


def main(argv: list[str]) -> int:
    """Return the exit code: 1 if the run has no metrics.jsonl, or no accuracy of one of its evaluation datasets, else 0.

    Nothing is printed, and the code is 0, if the arguments asked train.py for something other than training.
    """
    if translate(argv).action != "train":
        return 0
    cfg = load_config(argv, files=False)
    path = Path(cfg.run.dir) / "metrics.jsonl"
    if not path.is_file():
        sys.stderr.write(visible(f"the run wrote no {path}\n"))
        return 1
    return max([0, *(summarize(path, f"eval/{dataset}") for dataset in cfg.evaluation.datasets)])


def summarize(path: Path, metric: str) -> int:
    """Print the first and last value of ``metric`` in a metrics.jsonl. Return 1 if no line has it, else 0."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with_metric: list[dict[str, Any]] = [row for row in rows if metric in row]
    if not with_metric:
        sys.stderr.write(visible(f"{path} has no {metric}\n"))
        return 1
    first, last = with_metric[0], with_metric[-1]
    text = (
        f"held-out accuracy ({metric}): {first[metric]:.3f} {_step_text(first)}, {last[metric]:.3f} {_step_text(last)}"
    )
    print(visible(text))
    return 0


def _step_text(row: dict[str, Any]) -> str:
    """Describe the step of ``row`` in words."""
    return f"after {row['step']:g} rollouts" if row["step"] else "after the warm start"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SlimeLikeError as error:
        sys.exit(complaint(error).rstrip())
