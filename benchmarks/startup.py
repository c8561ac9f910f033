"""Time of the quickstart from its command to its first rollout, compared with a bare import of its libraries."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import read_lines

REPOSITORY = Path(__file__).resolve().parents[1]
BARE = "import torch, sglang, megatron.core, ray"
BARE_S, START_S = 300.0, 1_800.0  # limits of the bare import, and of the run, which may create the warm start
GOAL = 2.5
WARM_START = re.compile(r"^\w[\w-]*: warm start: ")  # the line of a run that creates the warm start
LINE = re.compile(r"^\w[\w-]*: (?P<step>.+?) after \d+ s")


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of a bare import; seconds from the command to each line printed at the start, and to the first rollout."""

    bare: float
    lines: dict[str, float]
    first_rollout: float  # until its first request is sent; engines then serve the trainer's weights
    warm_started: bool  # True if this round created the warm start, which later rounds reuse

    @property
    def ratio(self) -> float:
        """Time of a start divided by the time of a bare import."""
        return self.first_rollout / self.bare


def measure(rounds: int, work: Path) -> list[Round]:
    """Return the times of ``rounds`` + 1 rounds, each a bare import followed by a run. The first warms the file cache.

    Raises ``SystemExit`` if an import or a run fails or takes longer than its limit.
    """
    return [_round(work / f"run{index}") for index in range(rounds + 1)]


def _round(run_dir: Path) -> Round:
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}", "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    start = time.time()
    command = [sys.executable, "-W", "ignore", "-c", BARE]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = list(read_lines(process, limit_s=BARE_S))
    if process.returncode != 0:
        raise SystemExit(f"the bare import failed: {''.join(output[-3:])}")
    bare = time.time() - start
    command = [
        sys.executable,
        "train.py",
        "+recipe=quickstart",
        f"run.dir={run_dir}",
        "run.resume=never",
        "loop.num_rollout=1",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
        "evaluation.datasets={}",
        "metrics.console=plain",
    ]
    start = time.time()
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
    lines: dict[str, float] = {}
    warm_started = False
    for line in read_lines(process, limit_s=START_S):
        warm_started = warm_started or WARM_START.match(line) is not None
        if match := LINE.match(line):
            lines[match["step"]] = time.time() - start
        elif ": starting " in line:
            lines["configuration, data and tokenizer are read"] = time.time() - start
    if process.returncode != 0:
        raise SystemExit(f"the run in {run_dir} ended with exit code {process.returncode}")
    rows = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["step"] == 1)
    return Round(bare, lines, first["spans"]["rollout"][0] - start, warm_started)


def _warm_start(first: Round, rounds: Sequence[Round]) -> str:
    """Return a sentence on when the warm start, the recipe's initial model, was created; creating it takes a minute."""
    subject = "The quickstart's initial model"
    creating_rounds = [str(index) for index, round_ in enumerate(rounds, 1) if round_.warm_started]
    if creating_rounds:
        return f"{subject} was created in round {', '.join(creating_rounds)}, which took that much longer."
    origin = "created by the run before round 1" if first.warm_started else "present before the first run"
    return f"{subject} was {origin}, and every round used it."


def report(all_rounds: Sequence[Round], machine: str, command: str) -> str:
    """Return Markdown: the median ratio, all rounds except the first, and the times of the round nearest to the median."""
    first, *rounds = all_rounds
    ratio = statistics.median(round_.ratio for round_ in rounds)
    middle = min(rounds, key=lambda round_: abs(round_.ratio - ratio))
    out = ["# Start-up, measured", "", machine, "", f"Command: `{command}`. {_warm_start(first, rounds)}", ""]
    out += [
        f"From command to first rollout: **{ratio:.2f} times** a bare `{BARE}` (median of {len(rounds)} rounds, each a pair of an "
        f"import and a run, after a pair that is left out; goal at most {GOAL}).",
        "",
        "| round | bare import, s | first rollout, s | ratio |",
        "|---|---|---|---|",
    ]
    out += [f"| {i} | {r.bare:.1f} | {r.first_rollout:.1f} | {r.ratio:.2f} |" for i, r in enumerate(rounds, 1)]
    out += ["", "| in the round with the median ratio, time from the command until | s |", "|---|---|"]
    out += [f"| {line} | {seconds:.1f} |" for line, seconds in middle.lines.items()]
    out += [f"| first rollout begins | {middle.first_rollout:.1f} |", ""]
    return "\n".join(out)
