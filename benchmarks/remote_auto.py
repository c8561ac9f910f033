"""Prefill time of remote experts in mode ``auto`` relative to ``batched``; the modes alternate, so that other work slows both.

    python benchmarks/remote_auto.py [--rounds 20]

The settings are those of ``remote_experts.py``, in all of which prefill is faster in mode ``batched`` than in ``stream``. Mode
``auto`` has to choose between these two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY)]

from benchmarks.options import at_least  # noqa: E402
from benchmarks.remote_experts import SETTINGS, measure  # noqa: E402
from slime_like.printable import visible  # noqa: E402

BATCHED, AUTO = "batched, float32", "auto, float32"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=20)
    options = parser.parse_args()
    print(visible(f"load average {os.getloadavg()[0]:.1f} before the run\n"))
    print(visible("| worker | batched, s | auto, s | relative, median of the rounds |\n|---|--:|--:|--:|"))
    for title, setting in SETTINGS.items():
        results = measure(replace(setting, arms=(BATCHED, AUTO), decodes=False), options.rounds)
        batched, auto = results[BATCHED].prefill_s, results[AUTO].prefill_s
        ratio = statistics.median(a / b for a, b in zip(auto, batched, strict=True))
        line = f"| {title} | {statistics.median(batched):.3f} | {statistics.median(auto):.3f} | {ratio:.2f} |"
        print(visible(line), flush=True)


if __name__ == "__main__":
    main()
