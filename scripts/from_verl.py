"""Convert a launch script of verl, or a YAML file of its keys, into a recipe and report on every key.

A launch script contains python3 -m verl.trainer.main_ppo key=value ... No command of the script is run.

python scripts/from_verl.py run_qwen3_8b.sh [key=value ...] --with reward.name=math [--out my_configs/recipe/qwen3_8b.yaml]
    [--set NAME=VALUE] [--skip FILE] [--config FILE] [--drop KEY]
python scripts/from_verl.py --check FOLDER [--set NAME=VALUE] [--with KEY=VALUE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like_compat.conversion import Conversion, parse_assignments, print_conversion
from slime_like_compat.verl.check import check_verl
from slime_like_compat.verl.convert import VerlSource, convert_verl


def main(argv: list[str]) -> int:
    """Return the exit code: 0 if the recipe is the same job, 1 if user code has to be ported too, 2 if no recipe is written.

    ``--check`` keeps no recipe and returns 0, or 2 after an error.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path, help="a launch script, or a .yaml of verl's keys; a folder with --check")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of verl, applied after those of the job"
    )
    parser.add_argument("--check", action="store_true", help="print a table of the outcomes of all scripts in a folder")
    parser.add_argument("--out", type=Path, help="the recipe to write; default: from_verl/recipe/<name>.yaml")
    parser.add_argument(
        "--with", dest="user_overrides", action="append", default=[], metavar="KEY=VALUE", help="a key of ours"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script")
    parser.add_argument("--skip", action="append", default=[], metavar="FILE", help="a sourced file to leave out")
    parser.add_argument("--config", type=Path, help="the file that the script's --config-name names")
    parser.add_argument("--drop", action="append", default=[], metavar="KEY", help="a key of verl to leave out")
    parser.add_argument("--force", action="store_true", help="replace an existing recipe")
    args = parser.parse_intermixed_args(argv)

    def convert() -> Conversion | str:
        variables = parse_assignments("--set", args.set)
        parse_assignments("--with", args.user_overrides, dotted=True)
        if args.check:
            return check_verl(args.job, variables=variables, user_overrides=args.user_overrides)
        source = VerlSource(args.job, args.overrides, variables, args.skip, args.config)
        return convert_verl(source, args.out, user_overrides=args.user_overrides, drop=args.drop, force=args.force)

    return print_conversion(convert)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
