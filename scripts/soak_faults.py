"""Plant random faults in one long run, part after part, and compare it with one that nothing happened to.

python scripts/soak_faults.py [--faults 50] [--most 10] [--seed 0] [--rollouts 480] [--folder FOLDER] [--table FILE]

A part of the run is one call of train.py. Faults that a run goes on from (chaos.*: an engine killed, stopped or slow) strike
in four of its rollouts, at times before an engine is back from the last one, then one that ends it: a rank or the rollout
manager killed, a rank stopped, the driver killed, SIGINT or SIGTERM at a phase, or once or twice at a moment of its start.
Parts differ in the number of engines and in how weights reach them. A part is clean when its exit code is that of what ended
it (-15, of SIGTERM, only where that came before the run had taken signals over), and when it left one crash bundle, which
names the victim, where a rank or the manager ended it, and none elsewhere. After each part processes, listening ports, named
shared memory and scratch folders that it left are counted. At the end every sample (id, prompt, seed, tokens, log-
probabilities, version), every loss and the final weights are compared with the undisturbed run, bit for bit. The
folder keeps what has been done: the same command goes on where it stopped, by at most --most faults per call, and
rewrites the table.
"""

from __future__ import annotations

import argparse
import itertools
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

from slime_like.config.faults import FATAL, FAULTS, RECOVERED, Fault  # noqa: E402  (found by the line above)
from slime_like.data import faults  # noqa: E402
from slime_like.deadline import Deadline  # noqa: E402
from tests.e2e.runs import Training, last_step  # noqa: E402
from tests.e2e.same_run import differences, sample_differences, undisturbed  # noqa: E402

PHASES = {"collect": 0.25, "step": 0.1, "push": 0.1}  # of faults, and how long they take on an idle machine (s)
STARTING = "signals_at_start"
ENDS = (*FATAL, STARTING)
STARTED = ": starting "  # what a run says as soon as it has taken signals over
LAYOUTS = (  # what may change between parts of one run
    ("one engine", ()),
    ("two engines", ("rollout.num_engines=2",)),
    ("two engines, broadcast", ("rollout.num_engines=2", "placement.mode=split")),
)
SETTINGS = (
    *("health.interval_s=1", "health.timeout_s=8", "health.first_wait_s=0", "chaos.slow_s=3"),
    *("loop.step_deadline_s=60", "weights.push_deadline_s=60", "guard.deadline_s=10"),
)
CODES = {
    "kill_driver": -signal.SIGKILL,
    "interrupt": 130,
    "terminate": 130,
    STARTING: 130,
    "": 0,
}  # by what ended a part
# What ends a part with exit code 1 and a crash bundle, and whom the bundle must name.
VICTIMS = {"kill_rank": "trainer rank 0", "stop_rank": "trainer rank 0", "kill_manager": "rollout manager"}
STARTS = (2.0, 25.0)  # s within which signals at start come
PART_S = 300.0  # longest that a part may take: its start, four restarts, the deadlines of what ends it


@dataclass(frozen=True, slots=True)
class Part:
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
    early: bool = False  # its signals came before it had taken signals over
    causes: list[str] = field(default_factory=list[str])  # first lines of the crash bundles that it left

    @property
    def planted(self) -> list[tuple[str, str, str]]:
        """Outcomes of what was planted; the others are losses that followed from it."""
        return [found for found in self.outcomes if found[0].partition(":")[0] in FAULTS or found[0].startswith("SIG")]

    @property
    def clean(self) -> bool:
        """Whether it ended as its fault must, with the crash bundle that belongs to it."""
        codes = {CODES.get(self.end, 1)}
        if self.end == STARTING and self.early:  # nothing was there to be taken down
            codes.add(-signal.SIGTERM)
        return not self.hung and self.code in codes and self.explained

    @property
    def explained(self) -> bool:
        """Whether it left a crash bundle that names the victim where one is due, and none elsewhere."""
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
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "soak_faults")
    parser.add_argument("--table", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: the same command goes on"))
    soak = Soak(options.folder, options.seed, options.rollouts)
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
    print(soak.table())
    return int(not soak.good)


class Soak:
    """The undisturbed run, and the one that is disturbed, in one folder."""

    def __init__(self, folder: Path, seed: int, rollouts: int) -> None:
        self.folder, self.seed, self.rollouts = folder, seed, rollouts
        self.run = folder / "run"
        self.parts: list[Part] = []
        self._notes = folder / f"soak_{seed}.jsonl"
        if self._notes.exists():
            notes = [json.loads(line) for line in self._notes.read_text().splitlines()]
            self.parts = [Part(**(n | {"outcomes": [tuple(o) for o in n["outcomes"]]})) for n in notes]

    @property
    def num_faults(self) -> int:
        """Struck so far."""
        return sum(len(part.planted) for part in self.parts)

    @property
    def finished(self) -> bool:
        """Whether the disturbed run is at its end."""
        return (self.run / "hf" / "config.json").exists()

    @property
    def good(self) -> bool:
        """Whether every part ended as it must, nothing was left, and the samples so far are those of the undisturbed run."""
        return all(part.clean and not part.leftovers for part in self.parts) and not self._differences()

    def reference(self) -> None:
        """The run that nobody disturbs."""
        self._job, self.whole = undisturbed(self.folder, self.rollouts)

    def part(self, most: int) -> None:
        """Another part of the disturbed run, with at most so many faults; with none, the run goes on to its end."""
        number = len(self.parts)
        rng = random.Random(f"{self.seed} {number}")
        first = max(0, last_step(self.run))
        layout, overrides = rng.choice(LAYOUTS)
        apart = (1, 2) if layout == "one engine" else (4, 16)  # rollouts; with one engine none ends before it is back
        planted = self._draw(rng, first, most, apart)
        deck = random.Random(f"{self.seed} ends {number // len(ENDS)}").sample(
            ENDS, len(ENDS)
        )  # each as often as another
        end = deck[number % len(ENDS)] if most else ""
        if end in FATAL:
            at = min(planted[-1].rollout_id + rng.randint(*apart), self.rollouts - 1) if planted else first
            phase = rng.choice(list(PHASES))
            planted.append(Fault(end, phase, at, round(rng.uniform(0, PHASES[phase]), 3)))
        elif end == STARTING:
            planted = []
        named = f"chaos.faults=[{','.join(map(str, planted))}]"
        self._go(number, layout, end, (*overrides, *SETTINGS, named), rng)

    def _draw(self, rng: random.Random, first: int, most: int, apart: tuple[int, int]) -> list[Fault]:
        """Faults that the run goes on from, in rollouts that are so far ``apart``."""
        count = max(0, most - 1)
        kinds = [rng.choice(list(RECOVERED)) for _ in range(count)]
        phases = [rng.choice(list(PHASES)) for _ in range(count)]
        at = list(itertools.accumulate((rng.randint(*apart) for _ in range(count)), initial=first))
        return [
            Fault(kind, phase, rollout, round(rng.uniform(0, PHASES[phase]), 3))
            for rollout, kind, phase in zip(at, kinds, phases, strict=False)
            if rollout < self.rollouts - 1
        ]

    def _go(self, number: int, layout: str, end: str, overrides: tuple[str, ...], rng: random.Random) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="soak"))
        os.environ["TMPDIR"] = str(scratch)
        before, first, bundles = len(faults.read(self.run)[0]), last_step(self.run), set(self.run.glob("crash-*"))
        started = time.monotonic()
        log = self.folder / f"part_{number}.log"
        training = Training(*self._job, f"run.dir={self.run}", *overrides, log=log)
        try:
            sent, early = self._signals(training, log, rng) if end == STARTING else ([], False)
            code, hung = self._end(training)
        except BaseException:  # the soak itself is interrupted: the next one goes on where this part ended
            training.end()
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        seconds = time.monotonic() - started
        left = [*training.leftovers(), *(str(path) for path in scratch.iterdir() if path.name.startswith("slime_like"))]
        strikes, recoveries = faults.read(self.run)
        since = strikes[before].time if len(strikes) > before else float("inf")
        found = faults.outcomes(strikes[before:], [lost for lost in recoveries if lost.noticed >= since])
        outcomes = [(outcome.what, outcome.where, outcome.found) for outcome in found]
        said = log.read_text().strip().splitlines()[-1:] or [""]
        part = Part(
            number=number,
            layout=layout,
            end=end,
            code=code,
            seconds=round(seconds, 1),
            hung=hung,
            first=max(0, first),
            last=max(0, last_step(self.run)),
            outcomes=[*outcomes, *sent],
            leftovers=left,
            said=said[0],
            early=early,
            causes=[_first_line(bundle / "cause.txt") for bundle in sorted({*self.run.glob("crash-*")} - bundles)],
        )
        self.parts.append(part)
        with self._notes.open("a") as file:
            file.write(json.dumps(asdict(part)) + "\n")
        ended = f"{end or 'to its end'}, code {code}, {seconds:.0f} s, {len(left)} leftovers"
        print(f"part {number} ({layout}): {len(part.planted)} faults, {ended}; {self.num_faults} in all", flush=True)
        if not hung:
            shutil.rmtree(scratch, ignore_errors=True)

    @staticmethod
    def _signals(training: Training, log: Path, rng: random.Random) -> tuple[list[tuple[str, str, str]], bool]:
        """One or two signals at moments of the start; the first lets it go on to its first checkpoint.

        Also whether the last came before the run had taken signals over.
        """
        sent: list[tuple[str, str, str]] = []
        number = rng.choice((signal.SIGINT, signal.SIGTERM))
        at = rng.uniform(*STARTS)
        time.sleep(at)
        early = False
        for again in range(rng.choice((1, 2))):
            if training.running():
                early = STARTED not in log.read_text()
                training.signal(number)
                sent.append((f"{number.name} after {at:.1f} s", "driver", "the second" if again else "the first"))
                time.sleep(0.5)
        return sent, early

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
        for kind in (*RECOVERED, *FATAL, STARTING):
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
                f"{_code(part)} | {'; '.join(part.causes) or 'none'} | {part.seconds:.0f} | {', '.join(part.leftovers) or 'nothing'} |"
            )
        return "\n".join(lines) + "\n"

    def _counts(self) -> list[str]:
        planted = [found for part in self.parts for *_, found in part.planted]
        lost = [found for found in planted if "noticed after" in found]
        others = [found for part in self.parts for found in part.outcomes if found not in part.planted]
        ended = [part for part in self.parts if part.end]
        failed = [part for part in self.parts if part.code == 1]
        done = self.rollouts if self.finished else max(0, last_step(self.run))
        different = self._differences()
        compared = "samples, losses and weights" if self.finished else "samples so far"
        counts = {
            "faults": len(planted),
            "parts of the run": len(self.parts),
            "rollouts": f"{done} of {self.rollouts}",
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


def setting() -> str:
    """What ran where."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "sglang", "megatron-core", "ray"))
    return (
        f"Command: `python scripts/{Path(__file__).name} {' '.join(sys.argv[1:])}`, with SLIME_LIKE_DEADLINE_FACTOR="
        f"{os.environ.get('SLIME_LIKE_DEADLINE_FACTOR', '1')}. Commit {git.stdout.strip()}. Versions: {packages}, Python "
        f"{platform.python_version()}. Machine: {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GB, no GPU."
    )


def _code(part: Part) -> str:
    return f"{part.code}{' (before it had taken signals over)' * (part.early and part.code < 0)}"


def _first_line(path: Path) -> str:
    return (path.read_text().splitlines() or [""])[0].replace("|", "/") if path.exists() else f"no {path.name}"


def _summary(kind: str, here: list[tuple[Part, tuple[str, str, str]]]) -> str:
    if kind not in RECOVERED:
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
