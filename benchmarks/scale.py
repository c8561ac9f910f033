"""Control traffic of many engines and trainer ranks without models, handled by the code of a real run.

python benchmarks/scale.py --engines 4 32 128
python benchmarks/scale.py --ranks 16 64 256
python benchmarks/scale.py --rings 8 256 8192

Engines are HTTP servers, called through ``EnginePool``, ``EngineWeightUpdate`` and ``EngineClient``. Ranks are Ray actors, called
through ``TrainerGroup``. Rings are the records of the ranks' collectives, read after a hang. Results: docs/scale.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks import scale_engines, scale_ranks, scale_rings  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from slime_like.printable import visible  # noqa: E402

ROUNDS = 5


def main(argv: list[str]) -> int:
    """Print the tables; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=at_least(1), nargs="+", default=[], metavar="N", help="numbers of engines")
    parser.add_argument(
        "--ranks", type=at_least(8, multiple=8), nargs="+", default=[], metavar="N", help="numbers of trainer ranks"
    )
    parser.add_argument(
        "--rings",
        type=at_least(scale_rings.NODE),
        nargs="+",
        default=[],
        metavar="N",
        help="numbers of ranks with a ring",
    )
    parser.add_argument("--rounds", type=at_least(1), default=ROUNDS, help="measured rounds of each size")
    args = parser.parse_args(argv)
    if not args.engines and not args.ranks and not args.rings:
        parser.error("give --engines, --ranks or --rings")
    load = os.getloadavg()[0]
    print(visible(f"load average {load:.1f} at the start\n"))
    if args.engines:
        _print_engines([asyncio.run(scale_engines.measure(engines, args.rounds)) for engines in args.engines])
    if args.ranks:
        _print_ranks([scale_ranks.measure(ranks, args.rounds) for ranks in args.ranks])
    if args.rings:
        _print_rings([scale_rings.measure(ranks, args.rounds) for ranks in args.rings])
    return 0


def _print_engines(rows: list[scale_engines.EngineTimes]) -> None:
    print(
        "| engines | pause, open (s) | commit, flush (s) | resume (s) | health of all (s) | CPU of push and health (s) |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = (row.begin, row.commit, row.resume, row.health, row.cpu)
        print(visible(f"| {row.num_engines} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"))
    print()


def _print_ranks(rows: list[scale_ranks.RankTimes]) -> None:
    print(
        "| ranks | start (s) | step (s) | reduce metrics (s) | push (s) | probe (s) | offload (s) | CPU of the driver (s) | memory of the driver (MiB) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = (row.step, row.reduce, row.push, row.probe, row.offload, row.cpu)
        cells = " | ".join(f"{seconds:.3f}" for seconds in times)
        print(visible(f"| {row.num_ranks} | {row.start:.0f} | {cells} | {row.memory:.0f} |"))
    print()


def _print_rings(rows: list[scale_rings.RingTimes]) -> None:
    print(
        "| ranks | files of a rank (KiB) | describe its groups (ms) | report of a node (s) | rings | report of all (s) | crash bundle (s) |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        one = f"{row.num_bytes / 2**10:.0f} | {1e3 * row.describe:.1f} | {row.node:.3f}"
        print(visible(f"| {row.num_ranks} | {one} | {row.num_rings} | {row.all_rings:.3f} | {row.dump:.3f} |"))
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
