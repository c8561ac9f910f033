"""Write report.html of a finished or active run: curves, differences between trainer and engine, time, memory, sampled tokens.

python scripts/report.py runs/quickstart [--out report.html]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like.report.write import write_report


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 2 if the folder holds no run, or a file cannot be read or written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run.dir of a run")
    parser.add_argument("--out", type=Path, help="file to write; default: report.html in the run's folder")
    args = parser.parse_args(argv)
    try:
        print(visible(str(write_report(args.run, args.out))))
    except (SlimeLikeError, OSError) as error:
        sys.stderr.write(complaint(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
