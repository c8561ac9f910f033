"""Train a language model by reinforcement learning: ``python train.py +recipe=quickstart``, or ``--help``."""

import sys

from slime_like.config.flags import translate
from slime_like.errors import CheckpointError, ConfigError, DataError, RunComplete, SlimeLikeError


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 1 the run failed, 2 the configuration or its files are wrong, 130 stopped by Ctrl-C."""
    try:  # imports stand where they are needed, so that --help answers at once
        match (command := translate(argv)).action:
            case "doctor":
                from slime_like.cluster.doctor import doctor

                return doctor(sys.stdout)
            case "train":
                from slime_like.config.load import load_prepared

                cfg = load_prepared(argv)
                from slime_like.loop import train

                train(cfg)
            case _:
                from slime_like.cluster.plan_view import describe

                sys.stdout.write(describe(command, argv))
    except KeyboardInterrupt as error:
        sys.stderr.write(f"{str(error) or 'stopped'}\n")
        return 130
    except RunComplete as done:
        sys.stdout.write(f"{done}\n")
    except SlimeLikeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2 if isinstance(error, (ConfigError, DataError, CheckpointError)) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
