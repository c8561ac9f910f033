"""``scripts/bench_gdn.py --end-to-end``: the same run once per backend of Gated DeltaNet, and what each step of it took."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.load import load_config
from slime_like.config.rules import trainer_ranks
from slime_like.data.dump import load_groups
from slime_like.metrics.flops import DecoderShape, decoder_shape, train_flops

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 2  # steps that compile and tune
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
    """Of one run, each step after the warm-up: its metrics, and the length of every sequence trained on."""

    metrics: Sequence[Mapping[str, float]]
    lengths: Sequence[Sequence[int]]


def compare(backends: Sequence[str], overrides: Sequence[str]) -> int:
    """Run, print the table, and say of each backend that cannot run here why. Exit code 1 when none could."""
    rows, why = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in backends:
            folder = Path(scratch) / name
            arguments = [*overrides, "--qwen-gdn-backend", name, f"run.dir={folder}", "run.dump_rollouts=true"]
            done = subprocess.run(
                [sys.executable, "train.py", *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True
            )
            if done.returncode:
                why[name] = (
                    done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
                )
                continue
            cfg = load_config(arguments)
            shape = decoder_shape(json.loads((Path(cfg.model.hf_checkpoint) / "config.json").read_text()))
            rows.append(row(name, read_steps(folder), shape, trainer_ranks(cfg)))
    sys.stdout.write("\n".join(table(rows)) + "\n")
    for name, reason in why.items():
        sys.stdout.write(f"{name} did not run: {reason}\n")
    return int(not rows)


def read_steps(folder: Path) -> Steps:
    """``metrics.jsonl`` and the dumped rollouts of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in lines if "perf/actor_train_time" in line]
    dumps = sorted((folder / "rollouts").glob("rollout_*.npz"))
    lengths = [[len(s.token_ids) for group in load_groups(path) for s in group.samples] for path in dumps]
    return Steps(metrics[WARM_UP:], lengths[WARM_UP:])


def row(name: str, steps: Steps, shape: DecoderShape, ranks: int) -> list[str]:
    """Medians over the steps; ``ranks`` of the trainer share its FLOPs."""
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
        _median([step["perf/step_time"] for step in steps.metrics if "perf/step_time" in step], "{:.3f}"),
        _median(
            [s["perf/tokens_per_gpu_per_sec"] for s in steps.metrics if "perf/tokens_per_gpu_per_sec" in s], "{:.0f}"
        ),
        _median(tokens, "{:.0f}"),
        _median([f / 1e12 for f in flops], "{:.4g}"),
    ]
    return [name, *values]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)]


def _median(values: Sequence[float], form: str) -> str:
    return form.format(statistics.median(values)) if values else "-"
