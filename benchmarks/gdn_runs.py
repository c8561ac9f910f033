"""``benchmarks/gdn.py --end-to-end``: the same run once per backend of Gated DeltaNet, with the times of its steps.

The runs do not alternate: other work on the machine during one run changes only the row of that run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import read_lines
from slime_like.config.load.loader import load_config
from slime_like.config.rules.tree import trainer_ranks
from slime_like.data.dump import load_groups
from slime_like.metrics.flops import DecoderShape, decoder_shape, train_flops
from slime_like.printable import visible

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 2  # steps that compile and tune
KERNELS_LINE = "Gated DeltaNet ran on"  # precedes the kernels in the output of a run
COLUMNS = (
    "backend",
    "ref logprob s",
    "actor train s",
    "step s",
    "rollout tokens/GPU/s",
    "actor tokens/s",
    "TFLOPS/GPU",
)


@dataclass(frozen=True, slots=True)
class Steps:
    """Metrics of a run's steps after the warm-up, and the lengths of the sequences trained on in each of them."""

    metrics: Sequence[Mapping[str, float]]
    lengths: Sequence[Sequence[int]]


def compare(backends: Sequence[str], overrides: Sequence[str], rollouts: int) -> int:
    """Run train.py with each backend; print a table, the kernels that ran and why runs failed. Return 1 if all failed, else 0.

    Each run has ``rollouts`` steps and evaluates nothing, unless ``overrides`` say otherwise.
    """
    overridden = {override.partition("=")[0] for override in overrides}
    defaults = {"evaluation.datasets": "{}"}
    if "loop.num_epoch" not in overridden:
        defaults |= {"loop.num_rollout": str(rollouts), "loop.num_epoch": "null"}  # a recipe may set epochs
    short = [f"{key}={value}" for key, value in defaults.items() if key not in overridden]
    rows, kernels_of, reasons = [], {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in backends:
            folder = Path(scratch) / name
            arguments = [*overrides, *short, "--qwen-gdn-backend", name, f"run.dir={folder}", "run.dump_rollouts=true"]
            code, output, error = run(arguments)
            if code:
                reasons[name] = error or f"exit code {code}"
                continue
            kernels = next(
                (line.partition(KERNELS_LINE)[2].strip() for line in output if KERNELS_LINE in line), "not reported"
            )
            kernels_of[name] = kernels.removeprefix(f"{name}: ")
            cfg = load_config(arguments)
            shape = decoder_shape(json.loads((Path(cfg.model.hf_checkpoint) / "config.json").read_text()))
            rows.append(row(name, read_steps(folder), shape, trainer_ranks(cfg)))
    lines = [f"- `{name}` ran: {kernels}" for name, kernels in kernels_of.items()]
    lines += [f"- `{name}` did not run: {reason}" for name, reason in reasons.items()]
    sys.stdout.write(visible("\n".join(["", *table(rows), "", *lines, ""])))
    return int(not rows)


def run(arguments: Sequence[str]) -> tuple[int, list[str], str]:
    """Run train.py and print its stdout. Return the exit code, the lines of stdout, and the last line of stderr, or "".

    Raises ``SystemExit`` if the run takes longer than ``read_lines`` allows.
    """
    output: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "train.py", *arguments]
        child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, text=True)
        for line in read_lines(child):
            sys.stdout.write(visible(line))
            sys.stdout.flush()
            output.append(line)
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return child.returncode, output, lines[-1] if lines else ""


def read_steps(folder: Path) -> Steps:
    """Read the steps of a run after the warm-up, from ``metrics.jsonl`` and the dumped rollouts."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in lines if "perf/actor_train_time" in line]
    dumps = sorted((folder / "rollouts").glob("rollout_*.npz"))
    lengths = [[len(s.token_ids) for group in load_groups(path) for s in group.samples] for path in dumps]
    return Steps(metrics[WARM_UP:], lengths[WARM_UP:])


def row(name: str, steps: Steps, shape: DecoderShape, ranks: int) -> list[str]:
    """Return the row of backend ``name``: medians over the steps. FLOP/s are divided by ``ranks``, the number of trainer ranks."""
    train = [step["perf/actor_train_time"] for step in steps.metrics]
    tokens = [sum(lengths) / seconds for lengths, seconds in zip(steps.lengths, train, strict=False)]
    flops = [
        train_flops(shape, lengths) / seconds / ranks for lengths, seconds in zip(steps.lengths, train, strict=False)
    ]
    values = [
        _median(
            [step["perf/ref_log_probs_time"] for step in steps.metrics if "perf/ref_log_probs_time" in step], "{:.3f}"
        ),
        _median(train, "{:.3f}"),
        _median(
            [s["perf/step_time"] - s.get("perf/dump_time", 0.0) for s in steps.metrics if "perf/step_time" in s],
            "{:.3f}",
        ),
        _median(
            [s["perf/tokens_per_gpu_per_sec"] for s in steps.metrics if "perf/tokens_per_gpu_per_sec" in s], "{:.0f}"
        ),
        _median(tokens, "{:.0f}"),
        _median([f / 1e12 for f in flops], "{:.4g}"),
    ]
    return [name, *values]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "-"
