"""Compare two runs: their curves, the first step at which each metric differs, and their configurations.

python scripts/compare.py runs/a runs/b [--rtol 1e-6] [--atol 1e-12] [--metrics 'train/*'] [--times] [--html compare.html]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.printable import complaint, visible
from slime_like.report.comparison import compare
from slime_like.report.comparison_view import html_page, print_comparison, select_metrics
from slime_like.report.record import read_record


def main(argv: list[str]) -> int:
    """Print the comparison and return the exit code.

    The code is 1 if a selected metric that both runs have differs, 2 if a tolerance is invalid, a run cannot be read, no metric
    is comparable or the page cannot be written, and 0 otherwise.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="run.dir of a run")
    parser.add_argument("--rtol", type=float, default=1e-6, help="relative tolerance (1e-6)")
    parser.add_argument("--atol", type=float, default=1e-12, help="absolute tolerance (1e-12)")
    parser.add_argument(
        "--metrics", action="append", default=[], metavar="PATTERN", help="only metrics that match this pattern"
    )
    parser.add_argument("--times", action="store_true", help="also compare measured times")
    parser.add_argument("--html", type=Path, help="also write a self-contained page")
    args = parser.parse_args(argv)
    try:
        if not (args.rtol >= 0 and args.atol >= 0 and math.isfinite(args.rtol + args.atol)):
            raise ConfigError(f"--rtol {args.rtol} --atol {args.atol}: a tolerance is 0 or more")
        a, b = (read_record(folder) for folder in args.runs)
        comparison = compare(a, b, relative=args.rtol, absolute=args.atol, times=args.times)
        selected = select_metrics(comparison, args.metrics)
        if not selected:
            no_metrics = f"none like {', '.join(args.metrics)}" if comparison.metrics else "none"
            raise ConfigError(f"metrics in both runs: {no_metrics}; A has {', '.join(a.metrics)}")
        if not any(metric.num_common for metric in selected):
            steps = ", ".join(f"{run.folder} has steps {run.rows[0].step} to {run.rows[-1].step}" for run in (a, b))
            raise ConfigError(f"no metric has a value of both runs at the same step: {steps}")
        print_comparison(comparison, args.metrics, sys.stdout)
        if args.html is not None:
            args.html.parent.mkdir(parents=True, exist_ok=True)
            args.html.write_text(html_page(comparison, args.metrics))
            print(visible(f"\n{args.html}"))
    except (SlimeLikeError, OSError) as error:
        sys.stderr.write(complaint(error))
        return 2
    return 0 if all(metric.step is None for metric in selected) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
