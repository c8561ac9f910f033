"""Run everything that only a GPU can show, part by part in order of value, and write a page for each part.

    .venv/bin/python scripts/gpu_evidence.py                          # all parts without a result at this commit
    .venv/bin/python scripts/gpu_evidence.py --parts guard gdn        # only these of them
    .venv/bin/python scripts/gpu_evidence.py --again --minutes 30     # also parts with a result; starts no part after 30 minutes
    .venv/bin/python scripts/gpu_evidence.py --address auto           # also parts for several nodes, in this Ray cluster
    .venv/bin/python scripts/gpu_evidence.py --list --parts ipc       # commands of these parts
    .venv/bin/python scripts/gpu_evidence.py --write-not-run          # only update docs/measurements/NOT_RUN.md

Each part (evidence_parts.py, evidence_parts_large.py) is one or more commands with a time limit. At the limit their processes
are killed and the page shows the results up to then. Logs, runs and result are in runs/gpu_evidence/PART, which all nodes
must share for a part on several nodes. The page is gpu_PART.md in docs/measurements, and NOT_RUN.md there lists the parts
that have not passed. A part is skipped with the reason if packages, GPUs, nodes, models or data are missing.
scripts/gpu_bundle.py packs the files that a machine without a network needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks.options import at_least  # noqa: E402
from scripts.evidence_page import HEADING, NOT_RUN, PartResult, needs_of, not_run_section, page_of  # noqa: E402
from scripts.evidence_parts import ONE_GPU, TRAIN, Command, EvidencePart  # noqa: E402
from scripts.evidence_parts_large import SEVERAL_GPUS, SEVERAL_NODES  # noqa: E402
from scripts.page import TableFile, replace_section  # noqa: E402
from slime_like.errors import ConfigError, SlimeLikeError, exit_code  # noqa: E402
from slime_like.printable import visible  # noqa: E402

PARTS: tuple[EvidencePart, ...] = (*ONE_GPU, *SEVERAL_GPUS, *SEVERAL_NODES)
GIGABYTE = 10**9


def main(argv: Sequence[str]) -> int:
    """Run the parts, or list them with ``--list``.

    Return the exit code: 0 on success; 1 if a part failed or was killed; that of ``exit_code`` if an error stopped the script."""
    args = _parser().parse_args(argv)
    parts = [part for part in PARTS if not args.parts or part.name in args.parts]
    try:
        node_gpus = gpus_of_nodes(args.address) if args.address else []
        if args.list:
            for part in parts:
                _say(
                    f"{part.name:18} {part.minutes:3} min  {part.title}  ({skip_reason(part, node_gpus) or 'can run here'})"
                )
                for command in part.commands if args.parts else ():
                    _say(f"    python {' '.join(command)}")
            return 0
        results = {} if args.write_not_run else _run_parts(parts, node_gpus, args)
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    if (args.pages / NOT_RUN).is_file():
        replace_section(args.pages / NOT_RUN, HEADING, not_run_section(PARTS, args.pages))
    return int(not all(result.passed for result in results.values()))


def _run_parts(
    parts: Sequence[EvidencePart], node_gpus: Sequence[int], args: argparse.Namespace
) -> dict[str, PartResult]:
    """Run the parts that can run here, write their pages, and return the new results by name of the part.

    Without ``--again``, skip parts with a result at this commit. Start no part after ``--minutes``. Raises ``ConfigError``
    before the first part if a page was not written by this script.
    """
    try:
        pages = {
            part.name: TableFile(args.pages / f"gpu_{part.name}.md", Path(__file__).name)
            for part in parts
            if not skip_reason(part, node_gpus)
        }
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from error
    end = time.monotonic() + 60 * args.minutes
    results: dict[str, PartResult] = {}
    for part in parts:
        folder = args.work / part.name
        if time.monotonic() >= end:
            _say(f"{part.name}: not started within {args.minutes} minutes")
        elif reason := skip_reason(part, node_gpus):
            _say(f"{part.name}: {reason}")
        elif not args.again and (earlier := read_result(folder)) and earlier.commit == commit():
            _say(f"{part.name}: has a result at this commit: --again repeats it")
        else:
            results[part.name] = result = run_part(part, folder, args.address if part.num_nodes > 1 else "")
            pages[part.name].write(page_of(part, result, folder))
            _say(f"{part.name}: {result}")
    return results


def run_part(part: EvidencePart, folder: Path, address: str = "") -> PartResult:
    """Run the part's commands, each in its own session.

    At the part's time limit, kill the running command and skip the remaining ones. Write logs and result.json to
    ``folder``, which is removed first if it has the logs of an earlier call.
    """
    if (folder / "log_0").is_file():  # from an earlier call for this part, whose runs would be continued
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    codes: list[int | None] = []
    for number, command in enumerate(part.commands):
        seconds = max(0.0, start + 60 * part.minutes - time.monotonic())
        codes.append(_run(part.name, arguments_of(command, folder, address), folder / f"log_{number}", seconds))
        if codes[-1] is None:
            break
    result = PartResult(tuple(codes), round(time.monotonic() - start, 1), commit())
    (folder / "result.json").write_text(json.dumps(asdict(result)))
    return result


def arguments_of(command: Command, folder: Path, address: str) -> list[str]:
    """Return the arguments of Python for a command of a part, with the Ray ``address`` for train.py unless it is empty."""
    address_options = [f"placement.ray_address={address}"] if address and command[0] == TRAIN else []
    return [*(argument.replace("{folder}", str(folder)) for argument in command), *address_options]


def _run(name: str, arguments: Sequence[str], log: Path, seconds: float) -> int | None:
    """Run Python with ``arguments``, and write its output to ``log``. Return the exit code; None if killed after ``seconds``."""
    _say(f"{name}: python {' '.join(arguments).strip()}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def read_result(folder: Path) -> PartResult | None:
    """Return the result of an earlier run of the part; None if there is none that can be read."""
    try:
        values = json.loads((folder / "result.json").read_text())
        return PartResult(tuple(values["codes"]), values["seconds"], values["commit"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def commit() -> str:
    """Return a sentence that names the commit of the git checkout or, in a bundle of ``gpu_bundle.py``, of the bundled code."""
    bundled = REPOSITORY / "COMMIT"
    if bundled.is_file():
        return f"Commit {bundled.read_text().strip()}, from a bundle."
    from benchmarks.run import commit as commit_of_checkout  # its packages are not in a bundle

    return commit_of_checkout()


def skip_reason(part: EvidencePart, node_gpus: Sequence[int]) -> str | None:
    """Return the first unmet need of the part; None if there is none.

    ``node_gpus`` has the number of free GPUs of each node of the cluster, for parts on several nodes. The memory of the
    cluster's GPUs is not checked.
    """
    import torch

    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return f"needs {', '.join(missing)}"
    if missing := [name for name in part.files if not (REPOSITORY / name).is_dir()]:
        return f"needs {', '.join(missing)}"
    if part.num_nodes > 1:
        num_nodes = sum(gpus >= part.num_gpus for gpus in node_gpus)
        needs = f"needs --address of a Ray cluster with {part.num_nodes} nodes of {part.num_gpus} free GPUs"
        return None if num_nodes >= part.num_nodes else f"{needs}, and finds {num_nodes}"
    if (num_gpus := torch.cuda.device_count()) < part.num_gpus:
        return f"needs {next(needs_of(part))}, and torch finds {num_gpus}"
    total = torch.cuda.get_device_properties(0).total_memory / GIGABYTE
    return f"needs GPUs of {part.gb} GB, and GPU 0 has {total:.0f}" if total < part.gb else None


def gpus_of_nodes(address: str) -> list[int]:
    """Return the number of free GPUs of each node of the Ray cluster at ``address``, which this process joins and leaves.

    Raises ``ConfigError`` if no cluster answers there.
    """
    import ray

    from slime_like.cluster.plan.ray_cluster import cluster_nodes
    from slime_like.cluster.start.local_ray import available_resources_per_node, reach

    reach(address)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return [node.free_gpus for node in cluster_nodes(ray.nodes(), available_resources_per_node())]
    finally:
        ray.shutdown()


def _say(text: str) -> None:
    sys.stdout.write(visible(f"gpu_evidence: {text}\n"))
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these parts")
    parser.add_argument("--again", action="store_true", help="also run parts that have a result at this commit")
    parser.add_argument("--minutes", type=at_least(1), default=24 * 60, help="start no part after so many minutes")
    parser.add_argument("--address", help="Ray cluster for the parts of several nodes, as placement.ray_address")
    parser.add_argument("--list", action="store_true", help="print the parts and exit")
    parser.add_argument("--write-not-run", action="store_true", help=f"only write the list of parts in {NOT_RUN}")
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "gpu_evidence", help="logs and results")
    parser.add_argument("--pages", type=Path, default=REPOSITORY / "docs" / "measurements", help="folder of the pages")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
