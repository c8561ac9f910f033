"""Plant random faults in one long run, part after part, and compare it with one that nothing happened to.

python scripts/soak_faults.py [--faults 50] [--most 10] [--seed 0] [--rollouts 480] [--folder FOLDER] [--table FILE]
    [--write]

A part of the run is one call of train.py. Faults that a run survives (an engine or a part of it killed, stopped or slow, a
reward worker killed) strike in four of its rollouts, at times before an engine is back from the last one, then one that ends
it: a rank, the rollout manager, the driver or a process of Ray killed or stopped, SIGINT, SIGTERM or SIGHUP at a phase, or
once or twice at a moment of its start. The kinds that were tried least come first (``soak_draw.py``), so that 14 parts, of 66
faults where all strike, have each of them. Parts differ in the number of engines and in how weights reach them. A part is clean when its exit code is that
of what ended it, and when it left one crash bundle, which names the victim, where that was no signal, and none elsewhere. After
each part processes, listening ports, named
shared memory and scratch folders that it left are counted. At the end every sample (id, prompt, seed, tokens, log-
probabilities, version), every loss and the final weights are compared with the undisturbed run, bit for bit. The
folder keeps what has been done: the same command goes on where it stopped, by at most --most faults per call, and
rewrites the table. ``--write`` puts the counts by kind into docs/measurements/robustness.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
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

from scripts.page import replace_section  # noqa: E402  (found by the line above)
from scripts.soak_draw import STARTING, SURVIVED, draw_part  # noqa: E402
from slime_like.config.schema.faults import FATAL, FAULTS  # noqa: E402
from slime_like.data import faults  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.util.deadline import Deadline  # noqa: E402
from slime_like.util.private import temporary_folder  # noqa: E402
from tests.e2e.runs import Training, last_step  # noqa: E402
from tests.e2e.same_run import differences, sample_differences, undisturbed  # noqa: E402

SETTINGS = (
    *("health.interval_s=1", "health.timeout_s=8", "health.first_wait_s=0", "chaos.slow_s=3"),
    *("loop.step_deadline_s=60", "weights.push_deadline_s=60", "guard.deadline_s=10"),
)
PAGE = REPOSITORY / "docs" / "measurements" / "robustness.md"
HEADING = "## Faults"
MEANING = (
    "A fault is handled where the part of the run that it struck went on, or ended with its exit code and a crash bundle that "
    "names the victim, within every deadline, and left no process, port, shared memory or scratch folder behind."
)
CODES = {"interrupt": 130, "terminate": 130, "hangup": 130, STARTING: 130, "": 0}  # by what ended a part
# What ends a part with exit code 1 and a crash bundle, and whom the bundle must name.
VICTIMS = {
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
STARTS = (2.0, 25.0)  # s within which signals at start come
PART_S = 300.0  # longest that a part may take: its start, four restarts, the deadlines of what ends it


@dataclass(frozen=True, slots=True)
class SoakPart:
    """One call of train.py."""

    number: int
    layout: str
    end: str  # what was to end it; "" for nothing
    code: int
    seconds: float
    hung: bool
    first: int  # rollouts behind the run before, and after
    last: int
    outcomes: list[tuple[str, str, str]]  # fault, target, what came of it
    leftovers: list[str]
    said: str  # the last line of its output
    causes: list[str] = field(default_factory=list[str])  # first lines of the crash bundles that it left

    @property
    def planted(self) -> list[tuple[str, str, str]]:
        """Outcomes of the planted faults that met a process; the others are losses that followed from one."""
        return [outcome for outcome in self._drawn if outcome[1]]

    @property
    def missed(self) -> list[tuple[str, str, str]]:
        """Planted faults of which no victim was running."""
        return [outcome for outcome in self._drawn if not outcome[1]]

    @property
    def _drawn(self) -> list[tuple[str, str, str]]:
        return [one for one in self.outcomes if one[0].partition(":")[0] in FAULTS or one[0].startswith("SIG")]

    @property
    def clean(self) -> bool:
        """True if the part ended as its fault requires, with the expected crash bundle."""
        return not self.hung and self.code == CODES.get(self.end, 1) and self.explained

    @property
    def explained(self) -> bool:
        """True if a crash bundle naming the victim exists exactly when one is expected."""
        if self.end not in VICTIMS:
            return not self.causes
        return len(self.causes) == 1 and VICTIMS[self.end] in self.causes[0]


def main() -> int:
    """Exit code 0 when nothing hung, was lost, doubled or left behind, so far."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--most", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=480)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None)
    parser.add_argument("--write", action="store_true", help=f"replace the section {HEADING!r} of {PAGE.name}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: the same command goes on"))
    soak = FaultSoak(options.folder or temporary_folder("soak_faults"), options.seed, options.rollouts)
    soak.reference()
    stop_at = min(options.faults, soak.num_faults + options.most)
    while soak.num_faults < stop_at and not soak.finished:
        soak.part(min(stop_at, soak.num_faults + 5) - soak.num_faults)
        if options.table is not None:
            options.table.write_text(soak.table())
    if soak.num_faults >= options.faults and not soak.finished:
        soak.part(0)
        if options.table is not None:
            options.table.write_text(soak.table())
    print(visible(soak.table()))
    if options.write:
        replace_section(PAGE, HEADING, soak.section())
    return int(not soak.good)


class FaultSoak:
    """The undisturbed run, and the one that is disturbed, in one folder."""

    def __init__(self, folder: Path, seed: int, rollouts: int) -> None:
        self.folder, self.seed, self.rollouts = folder, seed, rollouts
        self.run = folder / "run"
        self.parts: list[SoakPart] = []
        self._notes = folder / f"soak_{seed}.jsonl"
        if self._notes.exists():
            notes = [json.loads(line) for line in self._notes.read_text().splitlines()]
            self.parts = [SoakPart(**(n | {"outcomes": [tuple(o) for o in n["outcomes"]]})) for n in notes]

    @property
    def num_faults(self) -> int:
        """Struck so far."""
        return sum(len(part.planted) for part in self.parts)

    @property
    def finished(self) -> bool:
        """True if the disturbed run is complete."""
        return (self.run / "hf" / "config.json").exists()

    @property
    def good(self) -> bool:
        """True if every part ended as required, left nothing behind, and the samples so far equal the undisturbed run's."""
        return all(part.clean and not part.leftovers for part in self.parts) and not self._differences()

    def reference(self) -> None:
        """The run that nobody disturbs."""
        self._job, self.whole = undisturbed(self.folder, self.rollouts)

    def part(self, most: int) -> None:
        """Another part of the disturbed run, with at most so many faults; with none, the run goes on to its end."""
        number = len(self.parts)
        rng = random.Random(f"{self.seed} {number}")
        first = max(0, last_step(self.run))
        ends = Counter(part.end for part in self.parts)
        struck = Counter(_kind(what) for part in self.parts for what, *_ in part.planted)
        plan = draw_part(rng, range(first, self.rollouts), most, ends, struck)
        named = f"chaos.faults=[{','.join(map(str, plan.faults))}]"
        self._go(number, plan.layout, plan.end, (*plan.overrides, *SETTINGS, named), rng)

    def _go(self, number: int, layout: str, end: str, overrides: tuple[str, ...], rng: random.Random) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="soak"))
        os.environ["TMPDIR"] = str(scratch)
        num_before, first, bundles = len(faults.read(self.run)[0]), last_step(self.run), set(self.run.glob("crash-*"))
        started = time.monotonic()
        log = self.folder / f"part_{number}.log"
        training = Training(*self._job, f"run.dir={self.run}", *overrides, log=log)
        try:
            sent = self._signals(training, rng) if end == STARTING else []
            code, hung = self._end(training)
        except BaseException:  # the soak itself is interrupted: the next one goes on where this part ended
            training.end()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        seconds = time.monotonic() - started
        leftovers = [
            *training.leftovers(),
            *(str(path) for path in scratch.iterdir() if path.name.startswith("slime_like")),
        ]
        strikes, recoveries = faults.read(self.run)
        since = strikes[num_before].time if len(strikes) > num_before else float("inf")
        found = faults.outcomes(
            strikes[num_before:], [recovery for recovery in recoveries if recovery.noticed >= since]
        )
        outcomes = [(outcome.what, outcome.where, outcome.found) for outcome in found]
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
            outcomes=[*outcomes, *sent],
            leftovers=leftovers,
            said=output[0],
            causes=[_first_line(bundle / "cause.txt") for bundle in sorted({*self.run.glob("crash-*")} - bundles)],
        )
        self.parts.append(part)
        with self._notes.open("a") as file:
            file.write(json.dumps(asdict(part)) + "\n")
        ended = f"{end or 'to its end'}, code {code}, {seconds:.0f} s, {len(leftovers)} leftovers"
        print(
            visible(f"part {number} ({layout}): {len(part.planted)} faults, {ended}; {self.num_faults} in all"),
            flush=True,
        )
        if not hung:
            shutil.rmtree(scratch, ignore_errors=True)

    @staticmethod
    def _signals(training: Training, rng: random.Random) -> list[tuple[str, str, str]]:
        """One or two signals at moments of the start; the first lets it go on to its first checkpoint."""
        sent: list[tuple[str, str, str]] = []
        number = rng.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        at = rng.uniform(*STARTS)
        time.sleep(at)
        for repeat in range(rng.choice((1, 2))):
            if training.running():
                training.signal(number)
                sent.append((f"{number.name} after {at:.1f} s", "driver", "the second" if repeat else "the first"))
                time.sleep(0.5)
        return sent

    @staticmethod
    def _end(training: Training) -> tuple[int, bool]:
        """Exit code, and whether it had to be killed."""
        deadline = Deadline("soak", "part", PART_S)
        while training.running():
            if deadline.elapsed() > deadline.limit:
                return training.end(), True
            training.look()
            time.sleep(0.5)
        return training.wait().code, False

    def _differences(self) -> list[str]:
        if self.finished:
            return differences(self.whole, self.run, self.rollouts)
        return sample_differences(self.whole, self.run, range(max(0, last_step(self.run))))

    def table(self) -> str:
        """Markdown: the counts, what became of each kind of fault, then each part."""
        lines = ["# Faults, soaked", "", setting(), "", *self._counts(), ""]
        lines += ["| fault | planted | came of it |", "|---|---|---|"]
        planted = [(part, outcome) for part in self.parts for outcome in part.planted]
        for kind in (*SURVIVED, *FATAL, STARTING):
            here = [
                (p, o)
                for p, o in planted
                if o[0].partition(":")[0] == kind or (kind == STARTING and o[0].startswith("SIG"))
            ]
            if here:
                lines.append(f"| {kind} | {len(here)} | {_summary(kind, here)} |")
        lines += [
            "",
            "| part | layout | rollouts | faults | ended by | code | crash bundle | s | left behind |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for part in self.parts:
            names = ", ".join(f"{what} ({where})" for what, where, _ in part.planted)
            lines.append(
                f"| {part.number} | {part.layout} | {part.first} to {part.last} | {names} | {part.end or 'its end'} | "
                f"{part.code} | {'; '.join(part.causes) or 'none'} | {part.seconds:.0f} | {', '.join(part.leftovers) or 'nothing'} |"
            )
        return "\n".join(lines) + "\n"

    def section(self) -> str:
        """Markdown: what was tried, handled and not, by kind of fault."""
        rows = ["| fault | tried | handled | not |", "|---|---|---|---|"]
        planted = [(part, found[0]) for part in self.parts for found in part.planted]
        for kind in (*SURVIVED, *FATAL, STARTING):
            here = [part for part, what in planted if _kind(what) == kind]
            handled = sum(part.clean and not part.leftovers for part in here)
            if here:
                rows.append(
                    f"| {FAULTS.get(kind, 'signals at the start')} | {len(here)} | {handled} | {len(here) - handled} |"
                )
        return "\n".join([HEADING, "", setting(), "", MEANING, "", *rows, "", *self._counts()]) + "\n"

    def _counts(self) -> list[str]:
        planted = [found for part in self.parts for *_, found in part.planted]
        lost = [found for found in planted if "noticed after" in found]
        others = [found for part in self.parts for found in part.outcomes if found not in (*part.planted, *part.missed)]
        ended = [part for part in self.parts if part.end]
        failed = [part for part in self.parts if part.code == 1]
        num_done = self.rollouts if self.finished else max(0, last_step(self.run))
        different = self._differences()
        compared = "samples, losses and weights" if self.finished else "samples so far"
        counts = {
            "faults": len(planted),
            "planted faults without a running victim, not counted": sum(len(part.missed) for part in self.parts),
            "parts of the run": len(self.parts),
            "rollouts": f"{num_done} of {self.rollouts}",
            "engines lost": len(lost),
            "of them serving again before the part ended": sum("serves" in found for found in lost),
            "further engines lost, as a consequence": len(others),
            "of these serving again before the part ended": sum("serves" in found for *_, found in others),
            "parts ended as their fault must": f"{sum(part.clean for part in ended)} of {len(ended)}",
            "crash bundles of parts that ended with exit code 1, the victim named": f"{sum(part.explained for part in failed)} of "
            f"{len(failed)}",
            "crash bundles of other parts": sum(len(part.causes) for part in self.parts if part not in failed),
            "hangs past the deadline": sum(part.hung for part in self.parts),
            f"samples lost, doubled or else not the undisturbed run's ({compared} compared)": len(different),
            "leftovers (processes with their ports, shared memory, scratch folders)": sum(
                len(part.leftovers) for part in self.parts
            ),
        }
        lines = ["| | |", "|---|---|", *(f"| {what} | {count} |" for what, count in counts.items())]
        return [*lines, *(f"- {text}" for text in different[:5])]


def _kind(what: str) -> str:
    return STARTING if what.startswith("SIG") else what.partition(":")[0]


def setting() -> str:
    """Return the command, versions and machine of this soak."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core", "ray"))
    return (
        f"Command: `python scripts/{Path(__file__).name} {' '.join(sys.argv[1:])}`, with SLIME_LIKE_DEADLINE_FACTOR="
        f"{os.environ.get('SLIME_LIKE_DEADLINE_FACTOR', '1')}. Commit {git.stdout.strip()}. Versions: {packages}, Python "
        f"{platform.python_version()}. Machine: {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GB, no GPU."
    )


def _first_line(path: Path) -> str:
    return (path.read_text().splitlines() or [""])[0].replace("|", "/") if path.exists() else f"no {path.name}"


def _summary(kind: str, here: list[tuple[SoakPart, tuple[str, str, str]]]) -> str:
    if kind in FATAL or kind == STARTING:
        return f"{sum(part.clean for part, _ in here)} ended the part as they must"
    lost = [what for _, (_, _, what) in here if "noticed after" in what]
    again = [
        float(what.rpartition("serves")[2].rpartition(" after ")[2].split(" s")[0]) for what in lost if "serves" in what
    ]
    times = f" {min(again):.1f} to {max(again):.1f} s after the fault" if again else ""
    found = [f"{len(lost)} engines lost", f"{len(again)} serving again{times}"]
    others = Counter(what for _, (_, _, what) in here if "noticed after" not in what)
    return ", ".join(found) + "".join(f"; {count}: {what}" for what, count in others.items())


if __name__ == "__main__":
    sys.exit(main())
