"""Inject random faults into one long run, part by part, and compare it with an undisturbed run.

python scripts/soak_faults.py [--faults 50] [--max-faults-per-call 50] [--seed 0] [--rollouts 480] [--folder FOLDER]
    [--table FILE] [--write]

A part of the run is one call of train.py. First it gets up to four faults that a run survives: an engine or a part of it is
killed, suspended (SIGSTOP) or slow, or a reward worker is killed. Some come before an engine serves again after the previous
fault. Then one fault ends the part: a rank, the rollout manager, the driver or a process of Ray is killed or suspended; SIGINT,
SIGTERM or SIGHUP arrives in a phase; or one of these signals arrives once or twice during the start. The least tried kinds are
drawn first (``soak_draw.py``), so that 14 parts, with 66 faults if the target of each is running, include every kind. Parts
differ in the number of engines and in the weight transport. A part is clean if it did not hang, its exit code fits its final
fault, and it left one crash bundle that names the target, or no bundle if it ended by a signal or by itself. After each part,
leftover processes, listening ports, named shared memory and scratch folders are counted. At the end every sample (id, prompt,
seed, tokens, log-probabilities, versions, reward) and the final weights are compared with the undisturbed run bit for bit, and
every loss within 1e-6. The folder keeps the progress: the same command continues an interrupted soak, and rewrites the table.
``--write`` puts the counts by kind into docs/measurements/robustness.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts.page import TableFile, commit, replace_section  # noqa: E402  (found by the line above)
from scripts.soak_draw import STARTING, SURVIVED, draw_part  # noqa: E402
from slime_like.config.schema.faults import FATAL, FAULTS  # noqa: E402
from slime_like.data import faults  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.util.counted import counted  # noqa: E402
from slime_like.util.deadline import Deadline  # noqa: E402
from slime_like.util.private import temporary_folder  # noqa: E402
from tests.e2e.runs import Training, last_step  # noqa: E402
from tests.e2e.same_run import differences, run_reference, sample_differences  # noqa: E402

SETTINGS = (
    *("health.interval_s=1", "health.timeout_s=8", "health.first_wait_s=0", "chaos.slow_s=3"),
    *("loop.step_deadline_s=60", "weights.push_deadline_s=60", "guard.deadline_s=10"),
)
PAGE = REPOSITORY / "docs" / "measurements" / "robustness.md"
HEADING = "## Faults"
MEANING = (
    "The run consists of parts, one call of train.py each. The faults of a part count as handled if the part continued after them, or "
    "ended with the expected exit code and, where one is due, a crash bundle that names the target; if it met every deadline; and if it "
    "left no process, port, shared memory or scratch folder behind."
)
CODES = {"interrupt": 130, "terminate": 130, "hangup": 130, STARTING: 130, "": 0}  # by the final fault of a part
# Faults that end a part with exit code 1 and a crash bundle -> the target that the bundle must name.
TARGETS = {
    "kill_rank": "trainer rank 0",
    "stop_rank": "trainer rank 0",
    "kill_manager": "rollout manager",
    "kill_driver": "the driver",
    "kill_raylet": "Ray's raylet",
    "stop_raylet": "Ray's raylet",
    "kill_gcs": "Ray's gcs_server",
    "stop_gcs": "Ray's gcs_server",
    "kill_dashboard_agent": "Ray's dashboard agent",
    "kill_runtime_env_agent": "Ray's runtime-env agent",
}
SIGNAL_TIMES_S = (2.0, 25.0)  # range of the time of signals at the start
MAX_IDLE_PARTS = 3
MAX_PART_S = 300.0  # limit for a part: its start, four restarts, the deadlines at its end


@dataclass(frozen=True, slots=True)
class SoakPart:
    """Result of one call of train.py."""

    number: int
    layout: str
    end: str  # final fault; "" for none
    code: int
    seconds: float
    hung: bool
    first: int  # rollouts trained before the part, and after it
    last: int
    outcomes: list[tuple[str, str, str]]  # (fault, target, outcome)
    leftovers: list[str]
    last_line: str  # last line of its output
    causes: list[str] = field(default_factory=list[str])  # first lines of its crash bundles

    @property
    def injected(self) -> list[tuple[str, str, str]]:
        """Outcomes of the injected faults. ``outcomes`` also has missed faults and further losses of engines."""
        return [outcome for outcome in self._planned if outcome[1]]

    @property
    def missed(self) -> list[tuple[str, str, str]]:
        """Planned faults whose target was not running."""
        return [outcome for outcome in self._planned if not outcome[1]]

    @property
    def _planned(self) -> list[tuple[str, str, str]]:
        return [
            outcome
            for outcome in self.outcomes
            if outcome[0].partition(":")[0] in FAULTS or outcome[0].startswith("SIG")
        ]

    @property
    def clean(self) -> bool:
        """True if the part did not hang, and its exit code and crash bundles are those that its final fault requires."""
        return not self.hung and self.code == CODES.get(self.end, 1) and self.explained

    @property
    def explained(self) -> bool:
        """True if there is one crash bundle, which names the final fault's target, or none after a signal or a normal end."""
        if self.end not in TARGETS:
            return not self.causes
        return len(self.causes) == 1 and TARGETS[self.end] in self.causes[0]


def main() -> int:
    """Run parts and print the table. Return exit code 0 if the soak so far is ``good``, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--max-faults-per-call", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=480)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--table", type=lambda text: TableFile(Path(text), Path(__file__).name), default=None)
    parser.add_argument("--write", action="store_true", help=f"replace the section {HEADING!r} of {PAGE.name}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: the same command continues the soak"))
    soak = FaultSoak(options.folder or temporary_folder("soak_faults"), options.seed, options.rollouts)
    soak.reference()
    stop_at = min(options.faults, soak.num_faults + options.max_faults_per_call)
    idle_parts = 0  # number of consecutive parts without an injected fault
    while soak.num_faults < stop_at and not soak.finished and idle_parts < MAX_IDLE_PARTS:
        num_faults = soak.num_faults
        soak.part(min(stop_at, num_faults + 5) - num_faults)
        idle_parts = 0 if soak.num_faults > num_faults else idle_parts + 1
        if options.table is not None:
            options.table.write(soak.table())
    if soak.num_faults >= options.faults and not soak.finished:
        soak.part(0)
        if options.table is not None:
            options.table.write(soak.table())
    print(visible(soak.table()))
    if options.write:
        replace_section(PAGE, HEADING, soak.section())
    return int(not soak.good)


class FaultSoak:
    """Undisturbed run and disturbed run, in one folder."""

    def __init__(self, folder: Path, seed: int, rollouts: int) -> None:
        self.folder, self.seed, self.rollouts = folder, seed, rollouts
        self.run = folder / "run"
        self.parts: list[SoakPart] = []
        self._results_file = folder / f"soak_{seed}.jsonl"
        if self._results_file.exists():
            results = [json.loads(line) for line in self._results_file.read_text().splitlines()]
            self.parts = [SoakPart(**(r | {"outcomes": [tuple(o) for o in r["outcomes"]]})) for r in results]

    @property
    def num_faults(self) -> int:
        """Number of faults injected so far."""
        return sum(len(part.injected) for part in self.parts)

    @property
    def finished(self) -> bool:
        """True if the disturbed run has completed and exported its model."""
        return (self.run / "hf" / "config.json").exists()

    @property
    def good(self) -> bool:
        """True if every part ended as required and left nothing behind, and no result so far differs from the undisturbed run."""
        return all(part.clean and not part.leftovers for part in self.parts) and not self._differences()

    def reference(self) -> None:
        """Do the undisturbed run, or reuse that of ``folder``. Call it first. Raises ``SystemExit`` if the run fails."""
        self._job, self.undisturbed_dir = run_reference(self.folder, self.rollouts)

    def part(self, max_faults: int) -> None:
        """Run a part of the disturbed run with up to ``max_faults`` faults (two signals count as one); with 0 it runs to its end.

        Record the part in ``parts`` and in the folder. ``TMPDIR`` of this process becomes the part's scratch folder.
        """
        number = len(self.parts)
        rng = random.Random(f"{self.seed} {number}")
        first = max(0, last_step(self.run))
        ends = Counter(part.end for part in self.parts)
        num_by_kind = Counter(_kind(fault) for part in self.parts for fault, *_ in part.injected)
        plan = draw_part(rng, range(first, self.rollouts), max_faults, ends, num_by_kind)
        override = f"chaos.faults=[{','.join(map(str, plan.faults))}]"
        self._run_part(number, plan.layout, plan.end, (*plan.overrides, *SETTINGS, override), rng)

    def _run_part(self, number: int, layout: str, end: str, overrides: tuple[str, ...], rng: random.Random) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="soak"))
        os.environ["TMPDIR"] = str(scratch)
        num_before, first, bundles = len(faults.read(self.run)[0]), last_step(self.run), set(self.run.glob("crash-*"))
        start = time.monotonic()
        log = self.folder / f"part_{number}.log"
        training = Training(*self._job, f"run.dir={self.run}", *overrides, log=log)
        try:
            signals_sent = self._signals(training, rng) if end == STARTING else []
            code, hung = self._wait(training)
        except BaseException:  # the soak is interrupted: this part is not recorded, and the next call continues the run
            training.kill()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        seconds = time.monotonic() - start
        leftovers = [
            *training.leftovers(),
            *(str(path) for path in scratch.iterdir() if path.name.startswith("slime_like")),
        ]
        injections, recoveries = faults.read(self.run)
        since = injections[num_before].time if len(injections) > num_before else float("inf")
        fault_outcomes = faults.outcomes(
            injections[num_before:], [recovery for recovery in recoveries if recovery.noticed >= since]
        )
        outcomes = [(outcome.fault, outcome.target, outcome.result) for outcome in fault_outcomes]
        output = log.read_text().strip().splitlines()[-1:] or [""]
        part = SoakPart(
            number=number,
            layout=layout,
            end=end,
            code=code,
            seconds=round(seconds, 1),
            hung=hung,
            first=max(0, first),
            last=max(0, last_step(self.run)),
            outcomes=[*outcomes, *signals_sent],
            leftovers=leftovers,
            last_line=output[0],
            causes=[_first_line(bundle / "cause.txt") for bundle in sorted({*self.run.glob("crash-*")} - bundles)],
        )
        self.parts.append(part)
        with self._results_file.open("a") as file:
            file.write(json.dumps(asdict(part)) + "\n")
        summary = f"{end or 'to its end'}, code {code}, {seconds:.0f} s, {len(leftovers)} leftovers"
        print(
            visible(f"part {number} ({layout}): {len(part.injected)} faults, {summary}; {self.num_faults} in all"),
            flush=True,
        )
        if not hung:
            shutil.rmtree(scratch, ignore_errors=True)

    @staticmethod
    def _signals(training: Training, rng: random.Random) -> list[tuple[str, str, str]]:
        """Send one or two signals during the start of a part; return an outcome for each.

        A signal ends the part at once early in its start, later with a save; a second one 0.5 s later ends it without a save.
        """
        signals_sent: list[tuple[str, str, str]] = []
        number = rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        at = rng.uniform(*SIGNAL_TIMES_S)
        time.sleep(at)
        for repeat in range(rng.choice((1, 2))):
            if training.running():
                training.signal(number)
                signals_sent.append(
                    (f"{number.name} after {at:.1f} s", "driver", "the second" if repeat else "the first")
                )
                time.sleep(0.5)
        return signals_sent

    @staticmethod
    def _wait(training: Training) -> tuple[int, bool]:
        """Wait for the end of the part. Return its exit code, and True if it hung and was killed."""
        deadline = Deadline("soak", "part", MAX_PART_S)
        while training.running():
            if deadline.elapsed() > deadline.limit:
                return training.kill(), True
            training.record()
            time.sleep(0.5)
        return training.wait().code, False

    def _differences(self) -> list[str]:
        if self.finished:
            return differences(self.run, self.rollouts, reference=self.undisturbed_dir)
        return sample_differences(self.run, range(max(0, last_step(self.run))), reference=self.undisturbed_dir)

    def table(self) -> str:
        """Return Markdown: the counts, the outcomes of each kind of fault, then each part."""
        lines = ["# Fault soak", "", setting(), "", *self._counts(), ""]
        lines += ["| fault | injected | result |", "|---|---|---|"]
        injections = [(part, outcome) for part in self.parts for outcome in part.injected]
        for kind in (*SURVIVED, *FATAL, STARTING):
            kind_outcomes = [
                (p, o)
                for p, o in injections
                if o[0].partition(":")[0] == kind or (kind == STARTING and o[0].startswith("SIG"))
            ]
            if kind_outcomes:
                lines.append(f"| {kind} | {len(kind_outcomes)} | {_summary(kind, kind_outcomes)} |")
        lines += [
            "",
            "| part | layout | rollouts | faults | ended by | code | crash bundle | s | left behind |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for part in self.parts:
            names = ", ".join(f"{fault} ({target})" for fault, target, _ in part.injected)
            lines.append(
                f"| {part.number} | {part.layout} | {part.first} to {part.last} | {names} | {part.end or 'its end'} | "
                f"{part.code} | {'; '.join(part.causes) or 'none'} | {part.seconds:.0f} | {', '.join(part.leftovers) or 'nothing'} |"
            )
        return "\n".join(lines) + "\n"

    def section(self) -> str:
        """Return the section ``HEADING`` of ``PAGE``: tried, handled and unhandled faults by kind, then the counts."""
        rows = ["| fault | tried | handled | not handled |", "|---|---|---|---|"]
        injections = [(part, outcome[0]) for part in self.parts for outcome in part.injected]
        for kind in (*SURVIVED, *FATAL, STARTING):
            kind_parts = [part for part, fault in injections if _kind(fault) == kind]
            num_handled = sum(part.clean and not part.leftovers for part in kind_parts)
            if kind_parts:
                rows.append(
                    f"| {FAULTS.get(kind, 'signals during startup')} | {len(kind_parts)} | {num_handled} | {len(kind_parts) - num_handled} |"
                )
        return "\n".join([HEADING, "", setting(), "", MEANING, "", *rows, "", *self._counts()]) + "\n"

    def _counts(self) -> list[str]:
        outcomes = [outcome for part in self.parts for *_, outcome in part.injected]
        engine_losses = [outcome for outcome in outcomes if "noticed after" in outcome]
        further_losses = [
            outcome for part in self.parts for outcome in part.outcomes if outcome not in (*part.injected, *part.missed)
        ]
        ended_parts = [part for part in self.parts if part.end]
        failed_parts = [part for part in self.parts if part.code == 1]
        num_done = self.rollouts if self.finished else max(0, last_step(self.run))
        differences = self._differences()
        compared = "samples, losses and weights" if self.finished else "samples so far"
        counts = {
            "faults": len(outcomes),
            "planned faults whose target was not running, not counted": sum(len(part.missed) for part in self.parts),
            "parts of the run": len(self.parts),
            "rollouts": f"{num_done} of {self.rollouts}",
            "engines lost": len(engine_losses),
            "of them serving again before the part ended": sum("serves" in outcome for outcome in engine_losses),
            "further engines lost, as a consequence": len(further_losses),
            "of these serving again before the part ended": sum("serves" in outcome for *_, outcome in further_losses),
            "parts that ended as their final fault requires": f"{sum(part.clean for part in ended_parts)} of {len(ended_parts)}",
            "crash bundles of parts that ended with exit code 1, naming the target": f"{sum(part.explained for part in failed_parts)} of "
            f"{len(failed_parts)}",
            "crash bundles of other parts": sum(len(part.causes) for part in self.parts if part not in failed_parts),
            "hangs past the deadline": sum(part.hung for part in self.parts),
            f"samples lost, doubled or different from the undisturbed run's ({compared} compared)": len(differences),
            "leftovers (processes with their ports, shared memory, scratch folders)": sum(
                len(part.leftovers) for part in self.parts
            ),
        }
        lines = ["| | |", "|---|---|", *(f"| {label} | {count} |" for label, count in counts.items())]
        return [*lines, *(f"- {text}" for text in differences[:5])]


def _kind(fault: str) -> str:
    return STARTING if fault.startswith("SIG") else fault.partition(":")[0]


def setting() -> str:
    """Return the command, versions and machine of this soak."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core", "ray"))
    return (
        f"Command: `python scripts/{Path(__file__).name} {' '.join(sys.argv[1:])}`, with SLIME_LIKE_DEADLINE_FACTOR="
        f"{os.environ.get('SLIME_LIKE_DEADLINE_FACTOR', '1')}. Commit {commit()}. Versions: {packages}, Python "
        f"{platform.python_version()}. Machine: {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GB, no GPU."
    )


def _first_line(path: Path) -> str:
    return (path.read_text().splitlines() or [""])[0].replace("|", "/") if path.exists() else f"no {path.name}"


def _summary(kind: str, kind_outcomes: list[tuple[SoakPart, tuple[str, str, str]]]) -> str:
    if kind in FATAL or kind == STARTING:
        return f"{sum(part.clean for part, _ in kind_outcomes)} ended the part as required"
    engine_losses = [outcome for _, (_, _, outcome) in kind_outcomes if "noticed after" in outcome]
    restart_times = [
        float(outcome.rpartition("serves")[2].rpartition(" after ")[2].split(" s")[0])
        for outcome in engine_losses
        if "serves" in outcome
    ]
    times = f" {min(restart_times):.1f} to {max(restart_times):.1f} s after the fault" if restart_times else ""
    counts = [f"{counted(len(engine_losses), 'engine')} lost", f"{len(restart_times)} serving again{times}"]
    other_outcomes = Counter(outcome for _, (_, _, outcome) in kind_outcomes if "noticed after" not in outcome)
    return ", ".join(counts) + "".join(f"; {count}: {outcome}" for outcome, count in other_outcomes.items())


if __name__ == "__main__":
    sys.exit(main())
