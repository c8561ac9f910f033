"""The run's folder: made, claimed for one run at a time, its configuration written."""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from slime_like.config.load import to_yaml
from slime_like.config.root import TrainConfig
from slime_like.errors import ConfigError


@contextmanager
def claimed(cfg: TrainConfig, run_dir: Path) -> Generator[None]:
    """Hold ``run_dir`` for this run; the kernel lets go of it when the process ends, however it ends.

    Raises ``ConfigError`` when it cannot be written, or when a living run holds it.
    """
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run.dir={cfg.run.dir!r} cannot be written ({error}): choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run.dir={cfg.run.dir!r} is held by a run that is still going on: wait for its end, or choose another run.dir"
            ) from error
        partial = run_dir / "config.yaml.partial"
        partial.write_text(to_yaml(cfg))
        partial.replace(run_dir / "config.yaml")
        yield
