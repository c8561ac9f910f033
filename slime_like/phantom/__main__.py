"""Run a command on phantom GPUs: ``python -m slime_like.phantom --memory 80 .venv/bin/python -m pytest -m gpu tests``."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys

from slime_like.errors import ConfigError, SlimeLikeError, exit_code
from slime_like.phantom.device import GIB, PhantomGpu
from slime_like.util.reading import reason


def main(argv: list[str]) -> int:
    """Replace this process with the command.

    Return an exit code if the command is not found or cannot be executed, or if the phantom GPUs' library cannot be compiled.
    Raises argparse's ``SystemExit`` on ``--help``, on invalid flags and without a command.
    """
    parser = argparse.ArgumentParser(prog="python -m slime_like.phantom", description=__doc__)
    parser.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="memory of each GPU")
    parser.add_argument("--devices", type=int, default=1, help="number of GPUs")
    parser.add_argument("--capability", default="9.0", help="compute capability")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if not options.command:
        parser.error("no command: append the program to run and its arguments")
    major, _, minor = str(options.capability).partition(".")
    if not (major.isdigit() and minor.isdigit()):
        parser.error(f"--capability {options.capability}: give it as 9.0")
    if not (math.isfinite(options.memory) and options.memory * GIB >= 1):
        parser.error(f"--memory {options.memory}: give the GiB of each GPU as a positive number, such as 80")
    if options.devices < 1:
        parser.error(f"--devices {options.devices}: give a number of GPUs of at least 1")
    gpu = PhantomGpu(int(options.memory * GIB), options.devices, (int(major), int(minor)))
    try:
        environment = {**os.environ, **gpu.environment()}
        program = shutil.which(options.command[0], path=environment["PATH"])
        if program is None:
            raise ConfigError(f"{options.command[0]} is not a program on PATH: give its path")
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    try:
        os.execve(program, options.command, environment)
    except OSError as error:
        failure = ConfigError(
            f"{program} cannot be executed ({reason(error)}): give a program, or a script that begins with #!"
        )
        failure.say()
        return exit_code(failure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
