"""Pages of ``gpu_evidence.py``: one for each part that ran, and the list in ``NOT_RUN.md`` of parts that have not passed."""

from __future__ import annotations

import importlib.util
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from scripts.evidence_parts import EvidencePart
from slime_like.errors import DataError
from slime_like.printable import visible
from slime_like.report.record import METRICS, RunRecord, read_record
from slime_like.util.counted import counted

LOG_LINES = 40  # last lines of each command's log
PASSED = "Result: passed"
HEADING = "## Parts of the script"
NOT_RUN = "NOT_RUN.md"
INTRODUCTION = (
    "`.venv/bin/python scripts/gpu_evidence.py --write-not-run` writes this section. Run a part with `--parts NAME`; `--list --parts NAME` "
    "prints its commands and what this machine lacks for it. In parentheses: GPUs, packages and files that the part needs, and its time "
    "limit. Every command should exit with 0. After each push, a run compares log-probabilities of engine and trainer (the "
    "probe, [architecture.md](../architecture.md#agreement-of-engine-and-trainer)), and ends with an error if they differ by "
    'more than a tolerance. After "Expect", names such as `offload` are those of the part\'s runs; '
    "[quickstart.md](quickstart.md) and "
    "[quickstart_hybrid.md](quickstart_hybrid.md) have curves on a CPU."
)
WIDTH = 138
FIGURES = (
    "eval/arithmetic",
    "eval/gsm8k",
    "probe/logprob_abs_diff_max",
    "train/train_rollout_logprob_abs_diff",
    "perf/step_time",
    "perf/rollout_time",
    "perf/tokens_per_gpu_per_sec",
    "perf/actor_train_time",
    "perf/update_weights_time",
    "perf/offload_time",
    "perf/save_time",
    "guard/time",
    "rollout/kv_capacity_tokens",
    "memory/collect",
    "memory/step",
    "memory/push",
    "train/value_loss",
    "train/moe_load",
)
TOKENS, SECONDS = "train/num_tokens", "perf/actor_train_time"


@dataclass(frozen=True, slots=True)
class PartResult:
    """Result of a part.

    ``codes`` are the exit codes of the started commands, None for a command that was killed at the limit. ``commit`` is
    a sentence that names the commit.
    """

    codes: tuple[int | None, ...]
    seconds: float
    commit: str

    @property
    def passed(self) -> bool:
        """True if every command exited with 0."""
        return all(code == 0 for code in self.codes)


def page_of(part: EvidencePart, result: PartResult, folder: Path) -> str:
    """Return the page of a part: machine, outcome of each test and figures of each run, commands and the end of their logs."""
    timeout_text = f"stopped at its limit of {part.minutes} min"
    codes = ", ".join(timeout_text if code is None else f"exit code {code}" for code in result.codes)
    lines = [
        f"# {part.title}, on a GPU",
        "",
        f"{_machine()}. {result.commit}",
        "",
        f"{PASSED if result.passed else 'Result: failed'} after {result.seconds:g} s ({codes}). Expected besides exit code 0: {part.expect or 'nothing'}.",
        "",
        *test_table(folder / "tests.xml"),
        *figure_table(folder),
    ]
    for number, command in enumerate(part.commands[: len(result.codes)]):
        text = " ".join(command).replace("{folder}", f"runs/gpu_evidence/{part.name}").strip()
        log = (folder / f"log_{number}").read_text(errors="replace").splitlines()
        lines += ["```", f"$ python {text}", *log[-LOG_LINES:], "```", ""]
    return visible("\n".join(lines))


def test_table(file: Path) -> Iterator[str]:
    """Yield a table of pytest's JUnit file: test, outcome, seconds, recorded properties.

    Yield nothing if there is no file.
    """
    if not file.is_file():
        return
    yield from ("| test | outcome | s | figures |", "|---|---|---|---|")
    for case in ElementTree.parse(file).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        figures = ", ".join(f"{p.get('name')} {p.get('value')}" for p in case.iter("property"))
        yield f"| `{case.get('name')}` | {outcome} | {case.get('time')} | {figures} |"
    yield ""


def figure_table(folder: Path) -> Iterator[str]:
    """Yield a table of the metrics that ``figures_of`` selects from each run in ``folder`` that has a file of metrics.

    A run of these that cannot be read has a row with the error. Yield nothing if there are no rows.
    """
    rows: list[str] = []
    for file in sorted(folder.glob(f"*/{METRICS}")):
        try:
            record = read_record(file.parent)
        except DataError as error:
            rows.append(f"| {file.parent.name} | {error} | | | | |")
            continue
        for name, values in figures_of(record):
            columns = (values[0], statistics.median(values), values[-1], max(values))
            rows.append(
                f"| {file.parent.name} | `{name}` | {' | '.join(f'{value:.5g}' for value in columns)} | {len(values)} |"
            )
    if rows:
        yield from (
            "| run | metric | first | median | last | largest | steps |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        )


def figures_of(record: RunRecord) -> Iterator[tuple[str, list[float]]]:
    """Yield the name of each metric that the page shows for a run, and its values over the steps."""
    for name in FIGURES:
        if values := [value for _, value in record.curve(name)]:
            yield name, values
    steps = [row.values for row in record.rows if row.values.get(SECONDS)]
    if rates := [values[TOKENS] / values[SECONDS] for values in steps if TOKENS in values]:
        yield f"{TOKENS} / {SECONDS}", rates


def has_passed(part: EvidencePart, pages: Path) -> bool:
    """Return True if the page of ``part`` in ``pages`` says that it passed."""
    page = pages / f"gpu_{part.name}.md"
    return page.is_file() and any(line.startswith(PASSED) for line in page.read_text().splitlines())


def not_run_section(parts: Sequence[EvidencePart], pages: Path) -> str:
    """Return the section of ``NOT_RUN.md`` with the parts that have not passed."""
    unproven_parts = [part for part in parts if not has_passed(part, pages)]
    lines = [HEADING, "", *_wrapped(INTRODUCTION, ""), ""]
    for part in unproven_parts:
        expect = f" Expect: {part.expect}." if part.expect else ""
        lines += _wrapped(
            f"- **{part.name}** ({', '.join(needs_of(part))}). {part.title}. Not run: {part.not_run}.{expect}", "  "
        )
    return "\n".join(lines)


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def needs_of(part: EvidencePart) -> Iterator[str]:
    """Yield texts: the GPUs of a part, its other needs and files, and its time limit."""
    gpus = f"{counted(part.num_gpus, 'GPU')}{f' of {part.gb} GB' * (part.gb > 0)}"
    yield f"{part.num_nodes} nodes of {gpus}" if part.num_nodes > 1 else gpus
    yield from (f"`{name}`" for name in (*part.needs, *part.files))
    yield f"{part.minutes} min"


def _machine() -> str:
    """Return the name of the first GPU, and the versions of CUDA, torch and Triton."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    triton = importlib.util.find_spec("triton")
    version = "none" if triton is None else __import__("triton").__version__
    return f"{name}, CUDA {torch.version.cuda}, torch {torch.__version__}, Triton {version}"
