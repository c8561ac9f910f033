"""Turn a launch script of slime (run-*.sh) into a recipe, and say what became of every flag. Nothing of it is run.

python scripts/from_slime.py run-qwen3-4B.sh [--out my_configs/recipe/qwen3_4b.yaml] [--set NUM_GPUS=8] [--skip FILE] [--drop FLAG]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from slime_like.convert.launch_script import read_launch
from slime_like.convert.recipe_file import write_recipe
from slime_like.errors import ConfigError, SlimeLikeError


def main(argv: list[str]) -> int:
    """Exit code: 0, or 2 where the script cannot be read or no configuration says what it says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--out", type=Path, help="the recipe to write; default: from_slime/recipe/<name>.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script")
    parser.add_argument("--skip", action="append", default=[], metavar="FILE", help="a sourced file to leave out")
    parser.add_argument("--drop", action="append", default=[], metavar="FLAG", help="a flag to leave out: --drop=--lr")
    parser.add_argument("--force", action="store_true", help="replace a recipe that is there")
    given = parser.parse_args(argv)
    try:
        if wrong := [text for text in given.set if not re.match(r"[A-Za-z_]\w*=", text)]:
            raise ConfigError(f"--set {wrong[0]}: write a variable of the script as NAME=VALUE")
        launch = read_launch(given.script, given=dict(text.split("=", 1) for text in given.set), skip=given.skip)
        sys.stdout.write(write_recipe(launch, given.out, drop=given.drop, force=given.force))
    except SlimeLikeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
