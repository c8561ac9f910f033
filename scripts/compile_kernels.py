"""Compile the Triton and TileLang kernels of a run before its first step, on a machine with or without a GPU.

    .venv/bin/python scripts/compile_kernels.py --plan-for 8xH100 +recipe=...             # for sm_90
    .venv/bin/python scripts/compile_kernels.py --plan-for 8xB200 +recipe=...             # for sm_100
    .venv/bin/python scripts/compile_kernels.py --plan-for 8xB200 --capability 9.0,10.0 +recipe=...   # for both
    export TRITON_CACHE_DIR=$HOME/.cache/slime_like/kernels TILELANG_CACHE_DIR=$HOME/.cache/slime_like/kernels/tilelang

All other arguments are those of train.py. Kernels are launched on a phantom GPU (docs/gpu.md). The command prints the kernels
in the cache. Set both variables before the run starts. To use the cache on another machine with the same package versions, copy
the folder and run `scripts/compile_kernels.py --moved --cache FOLDER` there, because Triton's cache contains absolute paths.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from slime_like.cluster.plan.compiled_kernels import (  # noqa: E402
    CompileJob,
    compile_engine,
    compile_trainer,
    run_capabilities,
)
from slime_like.errors import ConfigError, SlimeLikeError, exit_code  # noqa: E402
from slime_like.printable import visible  # noqa: E402
from slime_like.util.kernel_cache import cache_lines, cache_variables, read_cache, relocate  # noqa: E402

PARTS: dict[str, Callable[[CompileJob], list[dict[str, Any]]]] = {"trainer": compile_trainer, "engine": compile_engine}


def main(argv: Sequence[str]) -> int:
    """Compile for every capability or, with ``--moved``, make a copied cache usable. Return the exit code.

    The code is 1 if a function of the engine could not be compiled. If an error stops the command, the code is that of
    ``exit_code``.
    """
    args, run = _parser().parse_known_args(argv)
    folder = args.cache.expanduser().resolve()
    failed = False
    try:
        if args.moved:
            return _relocate(folder)
        _create(folder)
        for capability in args.capability or run_capabilities(args.plan_for):
            job = CompileJob(tuple(run), args.plan_for, capability, folder, args.first_configs)
            for part in args.parts:
                failed |= _compile(part, job)
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    for line in cache_lines(read_cache(folder)):
        _say(line)
    _say("export " + " ".join(f"{name}={value}" for name, value in cache_variables(folder).items()))
    return int(failed)


def _relocate(folder: Path) -> int:
    try:
        num_relocated = relocate(folder)
    except OSError as error:
        raise ConfigError(
            f"--cache {folder} cannot be written ({error.strerror}): copy it to a folder with space that this user may write to"
        ) from error
    if not num_relocated:
        raise ConfigError(f"--cache {folder} has no compiled kernels of Triton: give the folder that was copied")
    _say(f"{folder}: {num_relocated} kernel variants")
    return 0


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--cache {folder} cannot be created ({error.strerror}): give another folder") from error


def _compile(part: str, job: CompileJob) -> bool:
    """Compile one part; print the seconds it took and its failed functions. Return True if one failed."""
    start = time.monotonic()
    results = PARTS[part](job)
    _say(f"{part}, sm_{job.capability[0]}{job.capability[1]}: {time.monotonic() - start:.0f} s")
    failures = [f"  {result['name']}: {result['error']}" for result in results if result.get("error")]
    for line in failures:
        _say(line)
    return bool(failures)


def _capability(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise argparse.ArgumentTypeError(f"{text}: write a compute capability as 9.0")
    major, minor = text.split(".")
    return int(major), int(minor)


def _capabilities(text: str) -> list[tuple[int, int]]:
    return [_capability(part) for part in text.split(",")]


def _parts(text: str) -> list[str]:
    if unknown := [part for part in text.split(",") if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: write some of {','.join(PARTS)}")
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-for", metavar="GPUS", help="machine of the run, as of train.py; default: this machine")
    parser.add_argument(
        "--capability",
        type=_capabilities,
        metavar="C,C",
        help="compute capabilities; default: those of the machine's GPUs",
    )
    parser.add_argument("--parts", type=_parts, default=list(PARTS), metavar="P,P", help="trainer,engine by default")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "slime_like" / "kernels",
        help="folder of the compiled kernels",
    )
    parser.add_argument("--moved", action="store_true", help="only make a copied cache usable at its path")
    parser.add_argument(
        "--first-configs", action="store_true", help="one configuration of each autotuned kernel: a check, not a cache"
    )
    return parser


def _say(text: str) -> None:
    sys.stdout.write(visible(f"{text}\n"))
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
