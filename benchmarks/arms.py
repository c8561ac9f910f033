"""Run one arm of a benchmark in processes of its own, and record the times of its steps and its peak memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.inputs import CONTEXT, NEW_TOKENS, PROMPTS, SAMPLES, TOKENS, BenchInputs
from benchmarks.processes import RUN_S, STOP_S, command_text, stop

REPOSITORY = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "scripts" / "requirements" / "trl.txt"
LEARNING_RATE = 1e-3
WARM_UP = 2  # steps of each run whose times are left out
SAMPLE_S = 1.0  # interval of the memory readings
INSTALL_S = 1_800.0  # limit of each command that creates TRL's environment


@dataclass(slots=True)
class ArmRecord:
    """Steps of one arm, over all its runs."""

    arm: str
    step_s: list[float] = field(default_factory=list[float])
    parts_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    # Means of the first and of the last third of each run.
    rewards: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    peak_mib: float = 0.0
    runs: list[float] = field(default_factory=list[float])  # median seconds per step of each run
    versions: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def seconds(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.step_s)

    def part(self, name: str) -> float:
        """Return the median seconds of one part of a step."""
        return statistics.median(self.parts_s[name])

    def add(self, steps: Sequence[float], parts: dict[str, list[float]], rewards: Sequence[float]) -> None:
        """Add the times and two mean rewards of one run; leave out the first ``WARM_UP`` times of ``steps`` and of each part.

        The means are those of the first and of the last third of ``rewards``, which has a value for each step.
        """
        measured_steps = list(steps[WARM_UP:])
        self.step_s += measured_steps
        self.runs.append(statistics.median(measured_steps))
        for name, values in parts.items():
            self.parts_s.setdefault(name, []).extend(values[WARM_UP:])
        third = max(1, len(rewards) // 3)
        self.rewards.append((statistics.mean(rewards[:third]), statistics.mean(rewards[-third:])))


def run_tree(
    command: Sequence[str], environment: dict[str, str], log: Path, *, limit_s: float = RUN_S, stop_s: float = STOP_S
) -> float:
    """Run a command and return the peak proportional set size (PSS) of its process tree in MiB, sampled every ``SAMPLE_S``.

    The output is appended to ``log``. Raises ``SystemExit`` if the command fails or does not end within ``limit_s``; it is
    then stopped.
    """
    peak, has_ended = [0.0], threading.Event()
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )

        def watch() -> None:
            while not has_ended.wait(SAMPLE_S):
                peak[0] = max(peak[0], _memory(process.pid))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{command_text(process)} did not end within {limit_s:g} s; see {log}") from None
        finally:
            stop(process, stop_s)
            has_ended.set()
            watcher.join(2 * SAMPLE_S)
    if code != 0:
        raise SystemExit(f"{command_text(process)} ended with exit code {code}; see {log}")
    return peak[0]


def _memory(pid: int) -> float:
    """Return the proportional set size in MiB of a process and its descendants; a process that has ended counts 0."""
    total = 0
    try:
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            try:
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
            except (OSError, StopIteration):
                continue
    except psutil.Error:
        pass
    return total / 1024


def run_train_py(
    record: ArmRecord, inputs: BenchInputs, dtype: str, steps: int, work: Path, extra: Sequence[str]
) -> Path:
    """Run train.py on the same model, rows and sizes as TRL; add the run to ``record`` and return its folder.

    Raises ``SystemExit`` if the run fails or ``check_ours`` rejects its work.
    """
    run_dir = work / f"ours-{dtype}-{len(record.runs)}"
    overrides = [
        f"run.dir={run_dir}",
        f"run.name=bench-{dtype}",
        "run.resume=never",
        f"model.hf_checkpoint={inputs.model}",
        f"model.dtype={dtype}",
        f"data.train={inputs.rows}",
        "reward.name=benchmarks.reward:digits",
        f"rollout.batch_size={PROMPTS}",
        f"rollout.n_samples_per_prompt={SAMPLES}",
        f"rollout.max_response_len={NEW_TOKENS}",
        f"rollout.max_context_len={CONTEXT}",
        f"loop.num_rollout={steps}",
        f"optim.lr={LEARNING_RATE}",
        "placement.device=cpu",
        "metrics.console=plain",
    ]
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}", "HF_HUB_OFFLINE": "1"}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "train.py", *overrides, *extra]
    record.peak_mib = max(record.peak_mib, run_tree(command, environment, work / "ours.log"))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    check_ours(rows, steps)
    ends = [row["time"] for row in rows]
    spans = [{name: stop - start for name, (start, stop) in row["spans"].items()} for row in rows[1:]]
    step_times = [end - start for start, end in pairwise(ends)]
    parts = {name: [durations[name] for durations in spans] for name in ("rollout", "train", "update_weights")}
    parts["rest"] = [
        seconds - sum(durations[name] for name in parts) for seconds, durations in zip(step_times, spans, strict=True)
    ]  # rewards, assembly, logging, messages between processes
    record.add(step_times, parts, [row["rollout/raw_reward"] for row in rows])
    return run_dir


def check_ours(rows: Sequence[dict[str, Any]], steps: int) -> None:
    """Raise ``SystemExit`` unless there are ``steps`` rows, each of a step that did the expected work.

    In such a step every response has ``NEW_TOKENS`` tokens, ``TOKENS`` tokens are trained on, and the gradient norm is above 0.
    """
    tokens = {row["train/num_tokens"] for row in rows}
    lengths = {row["rollout/response_len/min"] for row in rows} | {row["rollout/response_len/max"] for row in rows}
    if len(rows) != steps or tokens != {TOKENS} or lengths != {NEW_TOKENS}:
        raise SystemExit(
            f"our arm did different work: {len(rows)} steps of {steps}, tokens {tokens}, lengths {lengths}"
        )
    if not all(row["train/grad_norm"] > 0 for row in rows):
        raise SystemExit("our arm took a step without a gradient")


def run_trl(record: ArmRecord, inputs: BenchInputs, dtype: str, steps: int, work: Path, python: Path) -> None:
    """Run TRL's GRPOTrainer in its own environment, with all cores; add the run to ``record``.

    Raises ``SystemExit`` if it fails or did not sample ``TOKENS`` tokens in each of ``steps`` steps.
    """
    out = work / f"trl-{dtype}-{len(record.runs)}.json"
    options: dict[str, Any] = {
        "model": inputs.model,
        "rows": inputs.rows,
        "out": out,
        "work": work / "trl",
        "steps": steps,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "new-tokens": NEW_TOKENS,
        "threads": len(os.sched_getaffinity(0)),
        "dtype": dtype,
        "lr": LEARNING_RATE,
    }
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(python), "benchmarks/trl_arm.py"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    record.peak_mib = max(record.peak_mib, run_tree(command, environment, work / "trl.log"))
    results = json.loads(out.read_text())
    if len(results["ends"]) != steps or set(results["tokens"]) != {TOKENS}:
        raise SystemExit(
            f"TRL's arm did different work: {len(results['ends'])} steps of {steps}, tokens {results['tokens']}"
        )
    step_times = [end - start for start, end in pairwise(results["ends"])]
    rollout = results["rollout_s"][1:]
    parts = {"rollout": rollout, "rest": [seconds - part for seconds, part in zip(step_times, rollout, strict=True)]}
    record.versions = results["versions"]
    record.add(step_times, parts, results["rewards"])


def trl_python(folder: Path) -> Path:
    """Return the interpreter of TRL's environment, which uv creates if it is missing or its requirements changed."""
    stamp, python = folder / "requirements.txt", folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        uv = str(Path(sys.executable).parent / "uv")
        for command in (
            ["venv", "--quiet", "--clear", "--python", sys.executable, str(folder)],
            ["pip", "install", "--quiet", "--python", str(python), "-r", str(REQUIREMENTS)],
        ):
            subprocess.run([uv, *command], check=True, timeout=INSTALL_S)
        subprocess.run([str(python), "-m", "compileall", "-q", str(folder / "lib")], check=False, timeout=INSTALL_S)
        stamp.write_text(REQUIREMENTS.read_text())
    return python
