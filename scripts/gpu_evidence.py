"""Run everything that only a GPU can show, part by part in order of value, and write a page for each part.

    .venv/bin/python scripts/gpu_evidence.py                          # all parts; a part that has a result at this commit is skipped
    .venv/bin/python scripts/gpu_evidence.py --parts guard gdn        # these parts
    .venv/bin/python scripts/gpu_evidence.py --again --minutes 30     # also parts with a result; starts no part after 30 minutes
    .venv/bin/python scripts/gpu_evidence.py --list

Each part is a command with a time limit. At the limit its processes are killed and the page shows the results up to then. Its log
and result are in runs/gpu_evidence/PART, its page is gpu_PART.md in docs/measurements. A part whose packages or GPUs are missing is
skipped with the reason. scripts/gpu_bundle.py packs what a machine without a network needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.run import commit as commit_of_checkout  # noqa: E402
from scripts.page import TableFile  # noqa: E402
from slime_like.printable import visible  # noqa: E402

PYTEST = (
    "-m",
    "pytest",
    "-v",
    "-n",
    "0",
    "-p",
    "no:cacheprovider",
    "-m",
    "gpu",
    "--tb=short",
    "--junitxml={folder}/tests.xml",
)
ENGINE = ("sglang", "ray")
TRAIN = ("train.py", "run.dir={folder}/run", "placement.device=cuda")
LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class EvidencePart:
    """One command. ``{folder}`` in an argument is the part's folder; ``page``: the command writes the page itself."""

    name: str
    title: str
    arguments: tuple[str, ...]
    minutes: int
    needs: tuple[str, ...] = ()  # packages
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class PartResult:
    """Result of a part: exit code (None: stopped at its limit), seconds, and the commit it ran at."""

    code: int | None
    seconds: float
    commit: str


PARTS: tuple[EvidencePart, ...] = (
    EvidencePart(
        "guard",
        "Memory guard and NCCL",
        (*PYTEST, "tests/distributed/test_gpu.py", "tests/cluster/test_peaks.py"),
        3,
    ),
    EvidencePart(
        "trainer",
        "Trainer against transformers",
        (*PYTEST, "tests/train/test_gpu.py", "tests/train/test_grouped_products.py"),
        15,
        ("megatron",),
    ),
    EvidencePart(
        "flow_mla",
        "FlowMLA's copies between two processes",
        (*PYTEST, "--noconftest", "tests/engine/test_flow_mla_gpu.py"),
        5,
    ),
    EvidencePart(
        "ipc",
        "Weights from one process to another over CUDA IPC",
        (*PYTEST, "--noconftest", "tests/weight_sync/test_ipc_gpu.py", "tests/weight_sync/test_shared_gpu.py"),
        5,
    ),
    EvidencePart("step", "Speed, memory and synchronisations of a training step", ("benchmarks/gpu_step.py",), 15, ("megatron",)),
    EvidencePart("gdn", "Gated DeltaNet kernels", (*PYTEST, "tests/gdn/test_gpu.py"), 15, ("fla",)),
    EvidencePart(
        "gdn_speed",
        "fla and FlashQLA",
        ("benchmarks/gdn.py", "--arms", "fla", "flashqla", "--shapes", "32768,16,32,128", "8x4096,16,32,128", "2048,16,32,128"),
        15,
        ("fla", "flash_qla"),
    ),
    EvidencePart("dcp", "Decode context parallelism's kernels", (*PYTEST, "tests/engine/test_dcp_flashinfer_gpu.py"), 10, ("flashinfer",)),
    EvidencePart("quickstart", "Quickstart", (*TRAIN, "+recipe=quickstart"), 20, ENGINE),
    EvidencePart(
        "deterministic", "Quickstart, deterministic", (*TRAIN, "+recipe=quickstart", "run.deterministic=true"), 20, ENGINE
    ),
    EvidencePart("one_gpu", "Small hybrid model in bfloat16", (*TRAIN, "+recipe=one_gpu"), 20, ENGINE),
    EvidencePart("engine_dcp", "Decode context parallelism, engines", (*PYTEST, "tests/engine/test_dcp_gpu.py"), 15, ENGINE, 2),
    EvidencePart(
        "engine_flow_mla", "FlowMLA, engines", (*PYTEST, "tests/engine/test_flow_mla_gpu_engines.py"), 15, ENGINE, 2
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run the parts. Return 1 if one of them failed or was stopped."""
    args = _parser().parse_args(argv)
    if args.list:
        for part in PARTS:
            _say(f"{part.name:14} {part.minutes:3} min  {part.title}  ({_reason_to_skip(part) or 'can run here'})")
        return 0
    end = time.monotonic() + 60 * args.minutes
    results: dict[str, PartResult | str] = {}
    for part in PARTS:
        if args.parts and part.name not in args.parts:
            continue
        folder = args.work / part.name
        if time.monotonic() >= end:
            results[part.name] = f"not started within {args.minutes} minutes"
        elif reason := _reason_to_skip(part):
            results[part.name] = reason
        elif not args.again and (earlier := read_result(folder)) and earlier.commit == commit():
            results[part.name] = "has a result at this commit: --again repeats it"
        else:
            page = TableFile(args.pages / f"gpu_{part.name}.md", Path(__file__).name)
            results[part.name] = result = run_part(part, folder)
            page.write(page_of(part, result, folder))
        _say(f"{part.name}: {results[part.name]}")
    return int(any(isinstance(result, PartResult) and result.code != 0 for result in results.values()))


def run_part(part: EvidencePart, folder: Path) -> PartResult:
    """Run the part's command in a session of its own, and kill it at its limit. Writes log and result.json to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tests.xml").unlink(missing_ok=True)
    command = [sys.executable, *(argument.format(folder=folder) for argument in part.arguments)]
    _say(f"{part.name}: {' '.join(command[1:])}")
    start = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(60 * part.minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    result = PartResult(code, round(time.monotonic() - start, 1), commit())
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    return result


def read_result(folder: Path) -> PartResult | None:
    """Return the result of an earlier run of the part, or None if there is none that can be read."""
    try:
        return PartResult(**json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def page_of(part: EvidencePart, result: PartResult, folder: Path) -> str:
    """Return the page of a part: machine, command, outcome of each test with its figures, and the end of the log."""
    outcome = f"stopped at its limit of {part.minutes} min" if result.code is None else f"exit code {result.code}"
    command = " ".join(argument.format(folder="runs/gpu_evidence") for argument in part.arguments)
    lines = [
        f"# {part.title}, on a GPU",
        "",
        f"{_machine()}. {result.commit}",
        "",
        f"Command: `python {command}`: {outcome} after {result.seconds:g} s.",
        "",
        *test_table(folder / "tests.xml"),
        "```",
        *(folder / "log").read_text(errors="replace").splitlines()[-LOG_LINES:],
        "```",
        "",
    ]
    return visible("\n".join(lines))


def test_table(file: Path) -> Iterator[str]:
    """Yield a table of pytest's JUnit file: test, outcome, seconds, recorded properties. Nothing if there is no file."""
    if not file.is_file():
        return
    yield from ("| test | outcome | s | figures |", "|---|---|---|---|")
    for case in ElementTree.parse(file).iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        figures = ", ".join(f"{p.get('name')} {p.get('value')}" for p in case.iter("property"))
        yield f"| `{case.get('name')}` | {outcome} | {case.get('time')} | {figures} |"
    yield ""


def commit() -> str:
    """Return a sentence with the commit: of the git checkout, or of the bundle of ``gpu_bundle.py``."""
    bundled = REPOSITORY / "COMMIT"
    return f"Commit {bundled.read_text().strip()}, from a bundle." if bundled.is_file() else commit_of_checkout()


def _reason_to_skip(part: EvidencePart) -> str | None:
    import torch

    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return f"needs {', '.join(missing)}"
    if torch.cuda.device_count() < part.num_gpus:
        return f"needs {part.num_gpus} GPUs, and torch finds {torch.cuda.device_count()}"
    return None


def _machine() -> str:
    """Return the GPU, and the versions of CUDA, torch and Triton."""
    import torch

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    triton = importlib.util.find_spec("triton")
    version = "none" if triton is None else __import__("triton").__version__
    return f"{name}, CUDA {torch.version.cuda}, torch {torch.__version__}, Triton {version}"


def _say(text: str) -> None:
    sys.stdout.write(visible(f"gpu_evidence: {text}\n"))
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these parts")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result at this commit")
    parser.add_argument("--minutes", type=at_least(1), default=24 * 60, help="start no part after so many minutes")
    parser.add_argument("--list", action="store_true", help="print the parts and exit")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "gpu_evidence", help="logs and results")
    parser.add_argument("--pages", type=Path, default=REPOSITORY / "docs" / "measurements", help="folder of the pages")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
