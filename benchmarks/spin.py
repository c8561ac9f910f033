"""Benchmark of training runs with several spin counts, which take turns; for ``benchmarks/run.py spin``.

A spin count is the number of turns that an engine's idle threads spin before they sleep.
The results are the time of a rollout, which includes the rollout manager, HTTP and the prefill, and the time of a decode
step in SGLang's scheduler, from the throughput that the engine logs every ``INTERVAL`` steps.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arms import ArmRecord, run_train_py
from benchmarks.inputs import NEW_TOKENS, PROMPTS, SAMPLES, TOKENS, write_inputs
from slime_like.printable import visible
from slime_like.rollout.engine.environment import SPIN

INTERVAL = 16  # decode steps; a divisor of NEW_TOKENS, so that most intervals lie within one rollout
DTYPE = "bfloat16"
LINE = re.compile(r"Decode batch.*#running-req: (\d+),.*gen throughput \(token/s\): ([\d.]+),")


@dataclass(slots=True)
class SpinArm:
    """Runs in which engine threads spin for the same number of turns before they sleep."""

    record: ArmRecord
    decode_s: list[list[float]] = field(default_factory=list[list[float]])  # by run: seconds per decode step

    @property
    def decode_ms(self) -> float:
        """Median milliseconds of a decode step of a full batch."""
        return 1e3 * statistics.median(seconds for run in self.decode_s for seconds in run)


def measure(sizes: Sequence[str], turns: Sequence[int], rounds: int, steps: int, work: Path) -> str:
    """Run all arms of each size in turn and return a table for each size."""
    tables: list[str] = []
    for size in sizes:
        folder = work / size
        folder.mkdir(exist_ok=True)
        inputs = write_inputs(folder, size)
        arms = {count: SpinArm(ArmRecord(f"{count:,}")) for count in turns}
        for index in range(rounds):
            for count, arm in arms.items():
                out = folder / str(count)
                out.mkdir(exist_ok=True)
                with _environment(SPIN, str(count)):
                    override = f"+rollout.sglang.decode_log_interval={INTERVAL}"
                    run_dir = run_train_py(arm.record, inputs, DTYPE, steps, out, [override])
                arm.decode_s.append(decode_seconds((run_dir / "logs" / "engine_0.log").read_text(errors="replace")))
                label = f"{size} round {index + 1}, {count} turns"
                print(
                    visible(f"{label}: rollout {rollout_by_round(arm.record, rounds=index + 1)[-1]:.3f} s"), flush=True
                )
        tables.append(table(size, rounds, steps, arms))
    return "\n".join(tables)


def decode_seconds(log: str) -> list[float]:
    """Return the seconds per decode step of each interval with a full batch. Raises ``SystemExit`` if the log has none."""
    rates = [(int(running), float(rate)) for running, rate in LINE.findall(log)]
    seconds = [running / rate for running, rate in rates if running == PROMPTS * SAMPLES and rate > 0]
    if not seconds:
        raise SystemExit("the engine's log names no decode batch of all samples: has SGLang changed the line?")
    return seconds


def rollout_by_round(record: ArmRecord, rounds: int) -> list[float]:
    """Return the median seconds of a rollout for each of the arm's ``rounds`` runs."""
    values = record.parts_s["rollout"]
    num_steps = len(values) // rounds
    return [statistics.median(values[i * num_steps : (i + 1) * num_steps]) for i in range(rounds)]


def table(size: str, rounds: int, steps: int, arms: dict[int, SpinArm]) -> str:
    """Return a Markdown table of the results for one model size."""
    lines = [
        f"{size}, {DTYPE}, {rounds} x {steps} steps, all arms in turn; {TOKENS} tokens a rollout, {NEW_TOKENS} a sample:",
        "",
        "| turns | s/step | rollout, s | by round | rest of a step, s | decode step in the scheduler, ms | all decode steps, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms.values():
        record = arm.record
        rollout, by_round = record.part("rollout"), rollout_by_round(record, rounds)
        lines.append(
            f"| {record.arm} | {record.seconds:.3f} | {rollout:.3f} | {', '.join(f'{value:.3f}' for value in by_round)} "
            f"| {record.seconds - rollout:.3f} | {arm.decode_ms:.2f} | {arm.decode_ms * (NEW_TOKENS - 1) / 1e3:.3f} |"
        )
    return "\n".join([*lines, ""])


@contextmanager
def _environment(name: str, value: str) -> Generator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
