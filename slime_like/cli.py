"""What ``train.py`` does with its arguments. Imports stand where they are needed, so that ``--help`` answers at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from slime_like.errors import CheckpointError, ConfigError, DataError, RunComplete, SlimeLikeError


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the configuration or its files are wrong, 130 stopped before its end."""
    try:
        return _run(list(argv))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{str(error) or 'stopped'}\n")
        return 130
    except RunComplete as done:
        sys.stdout.write(f"{done}\n")
        return 0
    except SlimeLikeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2 if isinstance(error, (ConfigError, DataError, CheckpointError)) else 1


def _run(argv: list[str]) -> int:
    from slime_like.config.flags import translate

    match (command := translate(argv)).action:
        case "doctor":
            from slime_like.cluster.doctor import doctor

            return doctor(sys.stdout)
        case "train":
            from slime_like.config.load import load_prepared

            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks for a save: to be survived before a run can read it
            cfg = load_prepared(argv)
            from slime_like.loop import train

            train(cfg)
        case _:
            from slime_like.cluster.plan_view import describe

            sys.stdout.write(describe(command, argv))
    return 0
