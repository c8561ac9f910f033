"""What ``train.py`` does with its arguments. Imports stand where they are needed, so that ``--help`` answers at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from slime_like.errors import ConfigError, RunComplete, SlimeLikeError, exit_code
from slime_like.printable import visible


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the configuration or its files are wrong, 130 stopped before its end."""
    return _coded(partial(_run, list(argv)))


def _coded(run: Callable[[], int]) -> int:
    """The exit code of ``run``, after its error is printed."""
    try:
        return run()
    except KeyboardInterrupt as error:
        sys.stderr.write(visible(f"{str(error) or 'stopped'}\n"))
        return exit_code(error)
    except RunComplete as done:
        sys.stdout.write(visible(f"{done}\n"))
        return exit_code(done)
    except SlimeLikeError as error:
        error.say()
        return exit_code(error)
    except OSError as error:  # of a path in the configuration: those of a run are explained where it ends
        if error.filename is None:
            raise
        refused = ConfigError(f"{error.filename}: {error.strerror}: correct the path, or its permissions")
        refused.say()
        return exit_code(refused)


def _run(argv: list[str]) -> int:
    from slime_like_compat.flags.translate import translate

    match (command := translate(argv)).action:
        case "doctor":
            from slime_like.cluster.start.doctor import doctor

            return doctor(sys.stdout)
        case "train":
            from slime_like.cluster.supervise.streams import keep_streams
            from slime_like.cluster.supervise.supervisor import supervise
            from slime_like.util.deadline import scale

            scale()  # refuses a malformed value before there is a process
            keep_streams()
            return supervise(partial(_coded, partial(_train, argv)))
        case _:
            from slime_like.cluster.plan.view import describe

            sys.stdout.write(visible(describe(command, argv)))
    return 0


def _train(argv: list[str]) -> int:
    """The driver."""
    from slime_like.config.load.loader import load_prepared

    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a save: to be survived before a run can read it
    cfg = load_prepared(argv)
    from slime_like.loop import train

    train(cfg)
    return 0
