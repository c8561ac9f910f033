"""Entry point of ``train.py``. Heavy modules are imported inside functions to keep ``--help`` fast."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from slime_like.errors import ConfigError, RunComplete, SlimeLikeError, exit_code
from slime_like.printable import print_output, visible


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 0 completed, 1 failed, 2 config, dataset or checkpoint error, 130 interrupted."""
    return _exit_code_of(partial(_run, list(argv)))


def _exit_code_of(run: Callable[[], int]) -> int:
    """Call ``run`` and return its exit code. If it raises an error meant for users, print it and return the error's code."""
    try:
        return run()
    except KeyboardInterrupt as error:
        sys.stderr.write(visible(f"{str(error) or 'stopped'}\n"))
        return exit_code(error)
    except RunComplete as complete:
        sys.stdout.write(visible(f"{complete}\n"))
        return exit_code(complete)
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    except OSError as error:  # its file is named in the configuration: a run handles its own errors
        if error.filename is None:
            raise
        config_error = ConfigError(f"{error.filename}: {error.strerror}: correct the path, or its permissions")
        config_error.say()
        return exit_code(config_error)


def _run(argv: list[str]) -> int:
    from slime_like.config.load.compat import translate

    match (command := translate(argv)).action:
        case "doctor":
            from slime_like.cluster.start.doctor import doctor

            return doctor(sys.stdout)
        case "train":
            from slime_like.cluster.supervise.streams import tolerate_write_errors
            from slime_like.cluster.supervise.supervisor import supervise
            from slime_like.util.deadline import scale

            scale()  # rejects a malformed SLIME_LIKE_DEADLINE_FACTOR before any process starts
            tolerate_write_errors()
            return supervise(partial(_exit_code_of, partial(_train, argv)))
        case _:
            from slime_like.cluster.plan.view import describe

            return print_output(describe(command, argv))


def _train(argv: list[str]) -> int:
    """Run the driver."""
    from slime_like.cluster.start.prepared import load_prepared

    # SIGUSR2 requests a save. It must not kill the driver before the run installs its handler.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    cfg = load_prepared(argv)
    from slime_like.loop import train

    train(cfg)
    return 0
