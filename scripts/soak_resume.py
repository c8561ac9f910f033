"""Kill a small deterministic run repeatedly, resume it each time, and compare it with an undisturbed run.

python scripts/soak_resume.py [--kills 50] [--seed 0] [--rollouts 20] [--folder FOLDER] [--table FILE]

Each kill is SIGKILL of the driver at a random point: a phase (collect, step, push, save), a rollout, and a time within the
phase's duration in the undisturbed run. A run gets a third to half as many kills as it has rollouts, and fewer if it has trained
all rollouts or ``--kills`` is reached. After the last kill the run continues to its end. Every sample (id, prompt, seed, tokens,
log-probabilities, versions, reward) and the final weights are compared with the undisturbed run bit for bit, and every loss
within 1e-6. Then the next run begins. The folder keeps the progress: the same command continues an interrupted soak, and
rewrites the table.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts.page import TableFile  # noqa: E402  (found by the line above)
from slime_like.checkpoint.files import LATEST, NONE_YET  # noqa: E402
from slime_like.config.schema.faults import Fault  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.util.private import temporary_folder  # noqa: E402
from tests.e2e.runs import metrics, train  # noqa: E402
from tests.e2e.same_run import (  # noqa: E402
    LOSS_TOLERANCE,
    PROBE_DIFFERENCE,
    SAMPLE_DIFFERENCE,
    differences,
    run_reference,
)

TIMES = {
    "collect": "perf/train_wait_time",
    "step": "perf/train_time",
    "push": "perf/update_weights_time",
    "save": "perf/save_time",
}
PHASES = tuple(TIMES)
MIN_ROLLOUTS = 3
SAVE_S = 0.3  # if the metrics have no save time


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: its intended point, and the checkpoint from which the run resumed."""

    run: int
    phase: str
    rollout_id: int
    seconds: float
    died: bool  # False: the run failed in another way
    resumed_at: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of a run after its kills with the undisturbed run. ``drift`` is 0 if engine and trainer agree."""

    run: int
    differences: list[str]
    drift: float  # largest |engine - trainer| log-probability, probes included


def main() -> int:
    """Return exit code 0 if ``good``: every kill succeeded, and every run had the undisturbed run's results and no drift."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--table", type=lambda text: TableFile(Path(text), Path(__file__).name), default=None)
    options = parser.parse_args()
    if options.rollouts < MIN_ROLLOUTS:
        parser.error(f"--rollouts {options.rollouts}: give {MIN_ROLLOUTS} or more, since a third of them are killed")
    soak = ResumeSoak(options.folder or temporary_folder("soak_resume"), options.seed, options.rollouts)
    soak.reference()
    while len(soak.kills) < options.kills and len(soak.verdicts) < options.kills:  # ends even if runs have no kill
        soak.one_run(options.kills - len(soak.kills))
        if options.table is not None:
            options.table.write(soak.table())
    print(visible(soak.table()))
    return int(not soak.good)


class ResumeSoak:
    """Undisturbed run and killed runs, in one folder."""

    def __init__(self, folder: Path, seed: int, rollouts: int) -> None:
        self.folder, self.seed, self.rollouts = folder, seed, rollouts
        self.kills: list[Kill] = []
        self.verdicts: list[Verdict] = []
        self._results_file = folder / f"soak_{seed}.jsonl"
        if self._results_file.exists():
            for line in self._results_file.read_text().splitlines():
                fields = json.loads(line)
                if fields.pop("kind") == "Kill":
                    self.kills.append(Kill(**fields))
                else:
                    self.verdicts.append(Verdict(**fields))
            ended_runs = {verdict.run for verdict in self.verdicts}
            self.kills = [kill for kill in self.kills if kill.run in ended_runs]  # an interrupted run is repeated

    @property
    def good(self) -> bool:
        """True if every kill succeeded, and every run had the undisturbed run's results and no ``drift`` (see ``Verdict``)."""
        return all(kill.died for kill in self.kills) and not any(v.differences or v.drift for v in self.verdicts)

    def reference(self) -> None:
        """Do the undisturbed run, or reuse that of ``folder``. ``one_run`` needs its results.

        Raises ``SystemExit`` if the undisturbed run fails.
        """
        self._job, self.undisturbed_dir = run_reference(self.folder, self.rollouts)
        rows = [row for row in metrics(self.undisturbed_dir) if row["step"] > 0]
        self._seconds = {phase: max(row.get(name, SAVE_S) for row in rows) for phase, name in TIMES.items()}

    def one_run(self, max_kills: int) -> None:
        """Kill a run at up to ``max_kills`` random points and resume it after each kill, until it ends.

        Compare its results with those of the undisturbed run.
        """
        run = len(self.verdicts)
        rng = random.Random(f"{self.seed} {run}")
        folder = self.folder / f"run_{run}"
        shutil.rmtree(folder, ignore_errors=True)
        kills: list[Kill] = []
        for _ in range(min(max_kills, rng.randint(self.rollouts // 3, self.rollouts // 2))):
            if self._saved(folder) == self.rollouts:
                break
            kills.append(self._kill(run, folder, rng))
            if not kills[-1].died:
                break
        result = train(*self._job, f"run.dir={folder}", log=self.folder / f"run_{run}_end.log")
        problems = [result.output[-500:]]
        if result.code == 0:
            problems = differences(folder, self.rollouts, reference=self.undisturbed_dir)
        values = [row[name] for row in metrics(folder) for name in (SAMPLE_DIFFERENCE, PROBE_DIFFERENCE) if name in row]
        verdict = Verdict(run, problems, max(values, default=float("nan")))
        with self._results_file.open("a") as file:
            for record in (*kills, verdict):
                file.write(json.dumps({"kind": type(record).__name__, **asdict(record)}) + "\n")
        self.kills += kills
        self.verdicts.append(verdict)
        print(
            visible(f"run {run}: {len(kills)} kills, {len(problems)} differences, {len(self.kills)} kills in all"),
            flush=True,
        )
        if not problems:
            shutil.rmtree(folder)

    def _kill(self, run: int, folder: Path, rng: random.Random) -> Kill:
        first = self._saved(folder)
        phase = rng.choice(PHASES)
        point = Fault(
            "kill_driver",
            phase,
            rng.randint(first, min(first + 1, self.rollouts - 1)),
            rng.uniform(0, self._seconds[phase]),
        )
        text = f"chaos.faults=[kill_driver:{point.phase}:{point.rollout_id}:{point.seconds:.3f}]"
        result = train(*self._job, f"run.dir={folder}", text, log=self.folder / f"run_{run}_kill.log")
        died = result.code == 1 and "was killed by SIGKILL" in result.output
        return Kill(run, phase, point.rollout_id, point.seconds, died, self._saved(folder))

    @staticmethod
    def _saved(folder: Path) -> int:
        """Return how many rollouts had been trained when the newest checkpoint was saved; 0 if there is no checkpoint."""
        marker = folder / "checkpoints" / LATEST
        text = marker.read_text() if marker.exists() else NONE_YET
        return 0 if text == NONE_YET else int(text)

    def table(self) -> str:
        """Return Markdown: a table of the phases with kills, a table of the runs, and a summary."""
        lines = [
            "| killed in phase | kills | earliest and latest time in the phase (s) | rollouts repeated |",
            "|---|---|---|---|",
        ]
        for phase in PHASES:
            kills = [kill for kill in self.kills if kill.phase == phase]
            if kills:
                times = [kill.seconds for kill in kills]
                redone = sum(kill.rollout_id + 1 - kill.resumed_at for kill in kills)
                lines.append(f"| {phase} | {len(kills)} | {min(times):.3f} to {max(times):.3f} | {redone} |")
        lines += [
            "",
            "| run | killed at phase:rollout:seconds (rollouts in the checkpoint from which it resumed) | differences | drift |",
            "|---|---|---|---|",
        ]
        for verdict in self.verdicts:
            points = ", ".join(
                f"{k.phase}:{k.rollout_id}:{k.seconds:.3f} ({k.resumed_at})" for k in self.kills if k.run == verdict.run
            )
            problems = "none" if not verdict.differences else "; ".join(verdict.differences[:3])
            lines.append(f"| {verdict.run} | {points} | {problems} | {verdict.drift:g} |")
        same = sum(not verdict.differences for verdict in self.verdicts)
        lines += [
            "",
            f"{len(self.kills)} kills; {same} of {len(self.verdicts)} runs ended with the samples and weights of the undisturbed "
            f"run, bit for bit, and with its losses within {LOSS_TOLERANCE:g}.",
        ]
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
