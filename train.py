"""Train a language model by reinforcement learning: ``python train.py +recipe=quickstart``, or ``--help``."""

import sys

SETUP = "run `bash scripts/setup.sh`, then `.venv/bin/python train.py` (or activate .venv)"
if sys.version_info < (3, 12):  # noqa: UP036  an older one may well be the first on PATH
    sys.exit("train.py needs Python 3.12, this is " + sys.version.split()[0] + " (" + sys.executable + "): " + SETUP)


def main(argv: "list[str]") -> int:
    """Run ``slime_like.cli.main`` and return its exit code, or 2 if a required package is not installed."""
    try:
        from slime_like.cli import main as run

        return run(argv)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("slime_like"):
            raise
        from slime_like.printable import visible

        sys.stderr.write(visible(f"{missing.name} is not installed for {sys.executable}: {SETUP}\n"))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
