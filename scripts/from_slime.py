"""Convert a launch script of slime (run-*.sh) into a recipe and report on every flag. No command of the script is run.

python scripts/from_slime.py run-qwen3-4B.sh [--out my_configs/recipe/qwen3_4b.yaml] [--set NUM_GPUS=8] [--skip FILE]
    [--drop FLAG]
python scripts/from_slime.py --check FOLDER   # outcomes of all launch scripts below a folder; no recipe is kept
Exit code 0: the recipe is the same job. 1: the functions that the recipe names have to be ported too. 2: there is no recipe.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like_compat.conversion import Conversion, parse_assignments, print_conversion
from slime_like_compat.slime.check import check_folder
from slime_like_compat.slime.job import convert_script


def main(argv: list[str]) -> int:
    """Return the exit code: 0 if the recipe is the same job, 1 if user code has to be ported too, 2 if no recipe is written.

    ``--check`` keeps no recipe and returns 0, or 2 after an error.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path, help="a launch script, or a folder of them with --check")
    parser.add_argument("--check", action="store_true", help="print a table of the outcomes of all scripts in a folder")
    parser.add_argument("--out", type=Path, help="the recipe to write; default: from_slime/recipe/<name>.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script")
    parser.add_argument("--skip", action="append", default=[], metavar="FILE", help="a sourced file to leave out")
    parser.add_argument("--drop", action="append", default=[], metavar="FLAG", help="a flag to leave out: --drop=--lr")
    parser.add_argument("--force", action="store_true", help="replace an existing recipe")
    args = parser.parse_args(argv)

    def convert() -> Conversion | str:
        variables = parse_assignments("--set", args.set)
        if args.check:
            return check_folder(args.script, variables=variables)
        return convert_script(
            args.script, args.out, variables=variables, skip=args.skip, drop=args.drop, force=args.force
        )

    return print_conversion(convert)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
