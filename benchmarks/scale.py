"""Control traffic of a manager with many engines: HTTP servers without models, under the manager's own code.

python benchmarks/scale.py --engines 4 32 128

The servers are called through ``EnginePool``, ``EngineWeightUpdate`` and ``EngineClient``. Results: docs/scale.md
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "plugins")]

from benchmarks import scale_engines  # noqa: E402
from benchmarks.options import at_least  # noqa: E402
from slime_like.printable import visible  # noqa: E402

ROUNDS = 5


def main(argv: list[str]) -> int:
    """Print the tables; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines", type=at_least(1), nargs="+", default=[4, 32, 128], metavar="N", help="numbers of engines"
    )
    parser.add_argument("--rounds", type=at_least(1), default=ROUNDS, help="measured rounds of each size")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    print(visible(f"load average {load:.1f} at the start\n"))
    _print_engines([asyncio.run(scale_engines.measure(engines, args.rounds)) for engines in args.engines])
    return 0


def _print_engines(rows: list[scale_engines.EngineTimes]) -> None:
    print("| engines | pause, open (s) | commit, flush (s) | resume (s) | health of all (s) | CPU of all (s) |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = (row.begin, row.commit, row.resume, row.health, row.cpu)
        print(visible(f"| {row.num_engines} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |"))
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
