"""Damage every file that a run reads, in many ways, and read it as a run does. No process of a run is started.

python scripts/soak_files.py [--count 1200] [--seed 0] [--write] [--show]
python scripts/soak_files.py --kind recipe [--count 1200] [--seed 0] [--show]

A small model, a reference model, data, a recipe and the folder of a stopped run are written to a temporary folder. Then,
``--count`` times, one file is damaged (bytes, one field, a folder or pipe in its place, its permissions), read by the readers
of ``train.py --plan``, of a resumed run and of its report, and restored. The exit code is 0 if each file was rejected with
one message, or read with a permitted value. ``--write`` replaces the section "Damaged files" of
docs/measurements/robustness.md. The script takes minutes.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from scripts.page import commit, replace_section  # noqa: E402  (found by the line above)
from slime_like.cluster.plan.machine import cpu_count  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from tests.damage.checks import FAULTS, ReadOutcome, RunFiles, Trial  # noqa: E402
from tests.damage.world import FILES  # noqa: E402

PAGE = REPOSITORY / "docs" / "measurements" / "robustness.md"
TITLE = "## Damaged files"
MAX_SHOWN = 1500  # printed characters of a failed trial's message


def main() -> int:
    """Return exit code 0 if each damaged file was rejected with one message, or read with a permitted value, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1200, help="number of damaged files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds of files whose name contains this text")
    parser.add_argument("--write", action="store_true", help=f"replace the section of {PAGE.relative_to(REPOSITORY)}")
    parser.add_argument("--show", action="store_true", help="print every trial")
    options = parser.parse_args()
    if not any(options.kind in name for name in FILES):
        parser.error(f"--kind {options.kind!r} matches no kind of files: choose from {'; '.join(FILES)}")
    if options.write and options.kind:
        parser.error(
            f"--write with --kind {options.kind!r}: the page's section has all kinds; leave out one of the options"
        )
    start = time.monotonic()
    trials = soak(options.count, options.seed, options.kind, show=options.show)
    command = f"scripts/soak_files.py --count {options.count} --seed {options.seed}"
    command += f" --kind {shlex.quote(options.kind)}" if options.kind else ""
    text = section(trials, command, time.monotonic() - start)
    print(visible(text))
    if options.write:
        replace_section(PAGE, TITLE, text)
    return int(any(trial.outcome in FAULTS for trial in trials))


def soak(num_files: int, seed: int, kind: str, *, show: bool) -> list[Trial]:
    """Damage and read ``num_files`` files, taking in turn the kinds whose names contain ``kind``; return the trials.

    Trials that find a fault are printed; with ``show``, all trials are.
    """
    kinds = [name for name in FILES if kind in name]
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as folder:
        world = RunFiles(Path(folder), trainer=True)
        for index in range(num_files):
            name = kinds[index % len(kinds)]
            rng = Random(f"{seed} {name} {index // len(kinds)}")
            trial = world.trial(name, rng.choice(FILES[name]), rng)
            trials.append(trial)
            if show or trial.outcome in FAULTS:
                print(
                    visible(f"{trial.outcome}: {trial.file}: {trial.damage}: {trial.message[-MAX_SHOWN:]}"), flush=True
                )
    return trials


def section(trials: list[Trial], command: str, seconds: float) -> str:
    """Return the section "Damaged files" of docs/measurements/robustness.md in Markdown."""
    num_trials = Counter((trial.kind, trial.outcome) for trial in trials)
    columns = [*ReadOutcome]
    rows = [f"| files | tried | {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) + 1)}"]
    for kind in dict.fromkeys(trial.kind for trial in trials):
        counts = [num_trials[kind, outcome] for outcome in columns]
        rows.append(f"| {kind} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    totals = [sum(num_trials[kind, outcome] for kind in FILES) for outcome in columns]
    rows.append(f"| all | {sum(totals)} | {' | '.join(map(str, totals))} |")
    name = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    machine = f"{cpu_count()} cores of an {name[1] if name else 'unknown processor'}"
    origin = f"Command: `{command}`. Commit {commit()}, {machine}, {seconds:.0f} s."
    return "\n".join([TITLE, "", origin, "", NOTES, "", *rows, ""])


NOTES = """\
A damaged file is *handled* if it is refused in one short message that names it (or its folder, if two files contradict each
other), if it is read as before, if unreadable lines of a log are set aside with a message, or if it is *another well-formed
file*: a value differs but is valid (another prompt, another epsilon of a norm, another number in a log), or the file is missing
and not needed. Failures are a traceback, a hang, any other refusal (*refused in other words*), and *accepted, but changed*: the
content of a checkpoint, a dumped rollout or `run.dir/config.yaml` differs and is used, or intact lines of a log are lost."""


if __name__ == "__main__":
    sys.exit(main())
