"""Create the run's folder, claim it for one run at a time, and write the configuration."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.checkpoint.files import replacing
from slime_like.config.load.loader import to_yaml
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.private import open_lock, owned_by_another_user
from slime_like.util.reading import reason


def check_folder(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if ``run.dir`` cannot be created and written, or if another user could have planted it.

    Folders that the check creates are removed.
    """
    run_dir = Path(os.path.realpath(cfg.run.dir))  # Path.resolve raises RuntimeError for a loop of links
    _check_owner(cfg, run_dir)
    missing: list[Path] = []
    try:
        missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise _unwritable(cfg, error) from error
    finally:
        with suppress(OSError):  # another run has created it, or written into it
            for folder in missing:
                folder.rmdir()


@contextmanager
def claim_folder(cfg: TrainConfig, run_dir: Path) -> Generator[None]:
    """Lock ``run_dir`` for this run and write ``config.yaml``. The lock is released when the block or the process ends.

    Raises ``ConfigError`` if the folder cannot be written or locked, is locked by a live run, or could have been planted by
    another user.
    """
    _check_owner(cfg, run_dir)
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = open_lock(run_dir / ".lock")
    except OSError as error:
        raise _unwritable(cfg, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"run.dir={cfg.run.dir!r} is in use by an active run: wait until that run ends, or choose another run.dir"
            ) from error
        except OSError as error:  # for example on NFS without its lock service
            raise ConfigError(
                f"run.dir={cfg.run.dir!r}: {run_dir / '.lock'} cannot be locked ({reason(error)}), so two runs could write into the folder: "
                "choose a run.dir on a file system with locks"
            ) from error
        try:
            with replacing(run_dir / "config.yaml") as scratch:
                scratch.write_text(to_yaml(cfg), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{run_dir / 'config.yaml'} cannot be written ({reason(error)}): move it away, or choose another run.dir"
            ) from error
        yield


def _check_owner(cfg: TrainConfig, run_dir: Path) -> None:
    unresolved = Path(cfg.run.dir).absolute()  # a link in the path may belong to another user
    if part := owned_by_another_user(unresolved) or owned_by_another_user(run_dir):
        raise ConfigError(
            f"run.dir={cfg.run.dir!r}: {part} belongs to another user, in a folder that others can write to: choose another "
            f"run.dir"
        )


def _unwritable(cfg: TrainConfig, error: OSError) -> ConfigError:
    return ConfigError(f"run.dir={cfg.run.dir!r} cannot be written ({error}): choose another folder")
