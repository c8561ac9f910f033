"""Benchmarks that compare arms within one call, on one machine.

python benchmarks/run.py trl       our recipe and TRL's GRPOTrainer on the same work, alternating
python benchmarks/run.py startup   from command to first rollout, compared with a bare import of the libraries
python benchmarks/run.py spin      our recipe with several spin counts of the engine's threads, alternating
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks import arms, spin, startup  # noqa: E402
from benchmarks.arms import ArmRecord  # noqa: E402
from benchmarks.inputs import NEW_TOKENS, PROMPTS, SAMPLES, SHAPES, TOKENS, write_inputs  # noqa: E402
from benchmarks.options import at_least, comma_separated, name_of  # noqa: E402
from slime_like.cluster.plan.machine import cpu_count, memory_bytes  # noqa: E402
from slime_like.printable import visible  # noqa: E402

CPU_INFO = Path("/proc/cpuinfo")
PAGES = REPOSITORY / "docs" / "measurements"
STEPS = {"tiny": 25, "20m": 12}
SPIN_STEPS = 15
GOALS = {"tiny": 1.2, "20m": 1.8}
QUIET_LOAD = 0.5
DTYPES = ("float32", "bfloat16")
MARK = "<!-- below: written by hand, kept by benchmarks/run.py -->"
BELOW = "<!-- measured -->"  # in pages whose measured part is at the end


def main(argv: list[str]) -> int:
    """Run the chosen benchmark and return 0; a failure of an arm ends the script with its message."""
    args = _parser().parse_args(argv)
    work = Path(args.work).resolve() if args.work else Path(tempfile.mkdtemp(prefix="slime_like-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        sys.stderr.write(
            visible(f"load average {load:.1f}: other processes run, and threads that spin (TRL's) suffer most of it\n")
        )
    machine_line, command, sizes = machine(load), f"python benchmarks/run.py {' '.join(argv)}", args.sizes
    if args.benchmark == "startup":
        page, text = "startup.md", startup.report(startup.measure(args.rounds, work), machine_line, command)
    elif args.benchmark == "spin":
        tables = spin.measure(sizes, args.turns, args.rounds, args.steps or SPIN_STEPS, work)
        page, text = None, "\n".join([machine_line, "", f"Command: `{command}`.", "", tables])
    else:
        python = arms.trl_python(Path(args.trl_env).resolve())
        tables = [compare(size, args, work, python) for size in sizes]
        page, text = "bench_trl.md", _page(tables, machine_line, command)
    sys.stdout.write(visible(text))
    if args.write and page is not None:
        write(PAGES / page, text)
    if not args.work:
        shutil.rmtree(work)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("trl", "startup", "spin"))
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each arm")
    parser.add_argument("--write", action="store_true", help="write the page in docs/measurements (spin has none)")
    parser.add_argument("--work", help="folder for models and runs; default: temporary")
    names = ", ".join(SHAPES)
    sizes = comma_separated(name_of(SHAPES, names))
    parser.add_argument("--sizes", type=sizes, default="tiny,20m", help=f"of {names}")
    min_steps = arms.WARM_UP + 2  # leaves one step time, which is measured between the ends of two steps
    parser.add_argument(
        "--steps", type=at_least(min_steps), help=f"steps per run; default {STEPS}, for spin {SPIN_STEPS}"
    )
    turns = comma_separated(at_least(0))
    parser.add_argument("--turns", type=turns, default="0,2000,5000", help="numbers of turns for spin")
    parser.add_argument("--trl-env", default="runs/bench/trl-env", help="TRL's environment; created if missing")
    parser.add_argument("--override", action="append", default=[], help="an override of train.py for our arms")
    return parser


def compare(size: str, args: argparse.Namespace, work: Path, python: Path) -> str:
    """Run all arms of one model size in turn and return the size's part of the page."""
    folder = work / size
    folder.mkdir(exist_ok=True)
    inputs, steps = write_inputs(folder, size), args.steps or STEPS[size]
    records = {(side, dtype): ArmRecord(f"{side}, {dtype}") for side in ("slime_like", "TRL") for dtype in DTYPES}
    for index in range(args.rounds):
        for dtype in DTYPES:
            arms.run_train_py(records["slime_like", dtype], inputs, dtype, steps, folder, args.override)
            arms.run_trl(records["TRL", dtype], inputs, dtype, steps, folder, python)
            for side in ("slime_like", "TRL"):
                record = records[side, dtype]
                sys.stderr.write(visible(f"{size} round {index + 1}: {record.arm}: {record.runs[-1]:.3f} s per step\n"))
    return table(size, inputs.num_parameters, steps, args.rounds, records)


def table(size: str, parameters: int, steps: int, rounds: int, records: dict[tuple[str, str], ArmRecord]) -> str:
    """Return the Markdown for one model size: TRL's time per step divided by ours, then a table of all arms.

    The quotient compares both sides, each in its faster dtype.
    """
    best = {
        side: min((r for (s, _), r in records.items() if s == side), key=lambda r: r.seconds)
        for side in ("slime_like", "TRL")
    }
    our_record, trl_record = best["slime_like"], best["TRL"]
    pairs = ", ".join(f"{trl_s / our_s:.2f}" for our_s, trl_s in zip(our_record.runs, trl_record.runs, strict=True))
    lines = [
        f"## {size}: {parameters / 1e6:.2f}M parameters, {rounds} x {steps} steps",
        "",
        f"Seconds per step of each side in its faster dtype: {trl_record.seconds:.3f} ({trl_record.arm}) / "
        f"{our_record.seconds:.3f} ({our_record.arm}) = **{trl_record.seconds / our_record.seconds:.2f}** "
        f"(goal at least {GOALS[size]}; by round {pairs}).",
        "",
        "| arm | s/step | tok/s | rollout tok/s | split of a step, s | peak memory, MiB | reward, first -> last third |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records.values():
        split = ", ".join(f"{name} {record.part(name):.3f}" for name in record.parts_s)
        rewards = "; ".join(f"{first:.3f} -> {last:.3f}" for first, last in record.rewards)
        lines.append(
            f"| {record.arm} | {record.seconds:.3f} | {TOKENS / record.seconds:.0f} | {TOKENS / record.part('rollout'):.0f} "
            f"| {split} | {record.peak_mib:.0f} | {rewards} |"
        )
    if trl_record.versions:
        lines += [
            "",
            "TRL's side: " + ", ".join(f"{name} {version}" for name, version in trl_record.versions.items()) + ".",
        ]
    return "\n".join([*lines, ""])


def _page(tables: list[str], machine_line: str, command: str) -> str:
    head = [
        "# Against TRL's GRPOTrainer, measured",
        "",
        machine_line,
        "",
        f"Command: `{command}`. Both sides in one run, alternating, on the same random model "
        f"and rows: {PROMPTS} prompts x {SAMPLES} samples x exactly {NEW_TOKENS} tokens (the end token lies outside the "
        "model's vocabulary), one AdamW update per step, no KL term, all cores. The script ends with an error unless every "
        f"step of both sides sampled {TOKENS} tokens and every step of slime_like trained on all of them. slime_like's side "
        "is train.py with the defaults for everything but model, data, reward, sizes, learning rate, device and outputs: Ray, "
        "engine over HTTP, weight push and the probe after each push, which compares log-probabilities of engine and trainer, "
        "are included. The time of a step runs from the end of the previous step to its own end. Times are medians over the "
        "steps of all runs, without each run's first three steps. Memory is the largest "
        "proportional set size of the whole process tree. The reward is the share of digits among the sampled tokens; the "
        "tables show its means over the first and over the last third of the steps, for each run.",
        "",
    ]
    return "\n".join([*head, *tables])


def commit() -> str:
    """Return a sentence that names the commit, and mentions changes to tracked files outside docs if there are any.

    If git cannot tell, the sentence says that the commit is unknown.
    """
    try:
        options = [
            ["rev-parse", "--short", "HEAD"],
            ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs"],
        ]
        head, changes = (
            subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
            for words in options
        )
    except (OSError, subprocess.CalledProcessError):
        return "Commit unknown (no git checkout)."
    return f"Commit {head}{', with changes that are not committed' if changes else ''}."


def cpu_model() -> str:
    """Return the name of the CPU, or of its architecture if /proc/cpuinfo has no name."""
    match = re.search(r"^model name\s*: (.+)$", CPU_INFO.read_text(), re.MULTILINE) if CPU_INFO.exists() else None
    return match[1] if match else platform.machine()


def machine(load: float) -> str:
    """Return a line with the machine, the load average ``load`` before the run, package versions and the commit."""
    cpu_info = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    features = [name for name in ("avx512f", "avx512_bf16", "amx_bf16") if name in cpu_info]
    names = ("torch", "sglang", "megatron-core", "ray", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        f"Machine: {cpu_count()} cores of {cpu_model()} ({', '.join(features) or 'no avx512'}), "
        f"{memory_bytes() / 2**30:.0f} GiB; load average {load:.1f} before the run. {versions}. {commit()}"
    )


def write(path: Path, text: str) -> None:
    """Replace the measured part of a page and keep the text below ``MARK``, which is written by hand."""
    below = path.read_text().partition(MARK)[2].lstrip("\n") if path.exists() else ""
    path.write_text(f"{text.rstrip()}\n\n{MARK}\n\n{below}" if below else f"{text.rstrip()}\n")


def write_below(path: Path, title: str, text: str) -> None:
    """Write a page with this title. In an existing page, replace only the part below ``BELOW``, which is appended if missing."""
    head = path.read_text().partition(BELOW)[0].rstrip() if path.exists() else title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}\n\n{BELOW}\n\n{text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
