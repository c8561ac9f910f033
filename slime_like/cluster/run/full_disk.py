"""Tolerate a full disk when writing files other than checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.config.schema.run import RunConfig
from slime_like.errors import CheckpointError, DeadlineExceeded, SlimeLikeError
from slime_like.printable import visible


@contextmanager
def tolerate_full_disk(path: Path, config: RunConfig) -> Generator[None]:
    """Run a block that writes ``path``. If it fails, remove ``path`` unless it is a folder, and only warn.

    With ``run.on_failed_save=stop``, raise ``SlimeLikeError`` instead of the warning. A failure is an ``OSError`` or
    ``CheckpointError``; other errors, and ``DeadlineExceeded``, are raised unchanged.
    """
    try:
        yield
    except DeadlineExceeded:  # also an OSError, but about processes that may still be writing
        raise
    except (OSError, CheckpointError) as error:
        with suppress(OSError):
            path.unlink()  # a truncated file would be reported as damaged
        text = str(error)
        if isinstance(error, OSError):
            text = f"{path}: {error.strerror or error}; is the disk full?"
        if config.on_failed_save == "stop":
            raise SlimeLikeError(f"{text} (run.on_failed_save=continue continues training without it)") from error
        sys.stderr.write(visible(f"warning: training continues without a file (run.on_failed_save=continue): {text}\n"))
