"""Functions for ``run.prepare`` of the default jobs. They create data and model and run the warm start once."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from slime_like.config.load.loader import saved_settings
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, WorkerError
from slime_like.printable import visible
from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.child import run_child
from slime_like.quickstart.model import DENSE, GDN, LATENT, MOE, NEXT, TOOL, ModelSpec, write_model
from slime_like.quickstart.tool import ToolSpec
from slime_like.util.counted import counted
from slime_like.util.deadline import Deadline
from slime_like.util.private import exclusive
from slime_like.util.reading import InputFile, typed

WARM_START_DEADLINE_S = 1800.0
EXPORT = "hf"  # folder in which run.save_hf writes weights
STAMP = "made_from.json"
FILES = "files"  # key of the stamp: the files that the warm start wrote
UNFINISHED = '"being made"'
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """Model, task and warm start of one default job, such as ``+recipe=quickstart``."""

    model: ModelSpec
    warm_start: str  # recipe of the warm start
    task: ArithmeticSpec | ToolSpec


def prepare(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(DENSE, "quickstart_sft", ArithmeticSpec()))


def prepare_gdn(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart_gdn``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(GDN, "quickstart_gdn_sft", ArithmeticSpec()))


def prepare_next(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart_next``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(NEXT, "quickstart_next_sft", ArithmeticSpec()))


def prepare_moe(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart_moe``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(MOE, "quickstart_moe_sft", ArithmeticSpec()))


def prepare_latent(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart_latent``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(LATENT, "quickstart_latent_sft", ArithmeticSpec()))


def prepare_tool(cfg: TrainConfig) -> None:
    """Prepare ``+recipe=quickstart_tool``; see ``prepare_job``."""
    prepare_job(cfg, PreparedJob(TOOL, "quickstart_tool_sft", ToolSpec()))


def prepare_job(cfg: TrainConfig, job: PreparedJob) -> None:
    """Create the missing inputs of ``cfg``: datasets, a random model and, unless algo=sft, a warm-started model.

    The folder of datasets and random model, and that of the warm start, each have a stamp of the specs and sources of their
    files, and are rewritten when one of these changes. A warm start that the user has run (``_is_users_warm_start``) is used
    as it is. Raises ``ConfigError`` as ``check_folders`` does, and for a folder of an outdated warm start in which the user
    may have files; ``WorkerError`` if the warm start fails; ``DeadlineExceeded`` if the warm start, or another quickstart that
    prepares the same files, takes longer than ``WARM_START_DEADLINE_S``.
    """
    check_folders(cfg)
    assets, warm = Path(cfg.data.train).parent, Path(cfg.model.hf_checkpoint).parent
    with _exclusive(assets.parent):
        _write_assets(assets, job)
        if not isinstance(cfg.algo, SftConfig):
            _warm_start(cfg, job, assets, warm)


def check_folders(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if the quickstart cannot use the folders of ``data.train`` and ``model.hf_checkpoint``.

    A folder is refused if it has files but no stamp. There is one exception: the folder of ``model.hf_checkpoint`` may be a
    finished warm start of the user (``_is_users_warm_start``), but not an unfinished one. The last part of the path
    ``model.hf_checkpoint`` must be ``EXPORT``. With algo=sft, only the folder of ``data.train`` is checked.
    """
    _check_owned("data.train", Path(cfg.data.train).parent)
    if isinstance(cfg.algo, SftConfig):
        return
    warm = Path(cfg.model.hf_checkpoint).parent
    if not _is_users_warm_start(cfg, warm):
        _check_owned("model.hf_checkpoint", warm)
    if Path(cfg.model.hf_checkpoint).name != EXPORT:
        raise ConfigError(f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} of the quickstart must end in /{EXPORT}")


def _check_owned(key: str, folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        raise ConfigError(
            f"{key}: the folder {folder} has files that the quickstart did not write and would overwrite; "
            "move it away, or set run.prepare=null to train on your own model and data"
        )


def _is_users_warm_start(cfg: TrainConfig, folder: Path) -> bool:
    """Return whether the user has run the warm start of ``cfg`` in ``folder``, for example with ``+recipe=quickstart_sft``.

    The quickstart starts from the export of this run, and neither repeats the run nor writes into its folder. Raises
    ``ConfigError`` if the run has no export yet, or if the config.yaml in ``folder`` is not that of a run.
    """
    path = folder / "config.yaml"
    if (folder / STAMP).exists() or not path.exists():
        return False
    fix = "move the folder away, or set run.prepare=null to train on your own model and data"
    file = InputFile(path, ConfigError, fix, "model.hf_checkpoint")
    tree = file.yaml()
    try:
        settings = saved_settings(tree)  # imports no functions of the user, unlike read_config
    except ConfigError as error:
        raise file.refused(f"cannot be used: {error}") from error
    is_warm_start = settings["algo"]["name"] == SftConfig().name and settings["run"]["prepare"] == cfg.run.prepare
    if is_warm_start and not (folder / EXPORT).is_dir():
        suffix = str(cfg.run.prepare).partition(":prepare")[2]  # "_gdn" of prepare_gdn and quickstart_gdn_sft
        raise ConfigError(
            f"model.hf_checkpoint: the run in {folder} has not written {folder / EXPORT} yet: finish it with the "
            f"command that started it (such as +recipe=quickstart{suffix}_sft), or move the folder away for a new warm start"
        )
    return is_warm_start


@contextmanager
def _exclusive(folder: Path) -> Generator[None]:
    """Hold a lock in ``folder``, because quickstarts that run at the same time share its files.

    Raises ``DeadlineExceeded`` if another process holds it for longer than ``WARM_START_DEADLINE_S``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = Deadline("quickstart", "prepare", WARM_START_DEADLINE_S)
    with exclusive(folder / ".quickstart.lock", deadline, "another quickstart that prepares the same files"):
        yield


def _write_assets(folder: Path, job: PreparedJob) -> None:
    stamp = _stamp(job)
    if _read_stamp(folder) == stamp:
        return
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP).write_text(UNFINISHED)
    job.task.write(folder)
    write_model(folder / "model", job.model)
    (folder / STAMP).write_text(json.dumps(stamp))
    _say(f"wrote datasets and a random model to {folder} in {time.monotonic() - start:.1f} s")


def _warm_start(cfg: TrainConfig, job: PreparedJob, assets: Path, run_dir: Path) -> None:
    if _is_users_warm_start(cfg, run_dir):
        _say(f"starting from the export of the run in {run_dir}")
        return
    recipes = REPOSITORY / "configs" / "recipe"
    stamp = _stamp(job) | {"recipe": [_digest(recipes / f"{name}.yaml") for name in ("quickstart_sft", job.warm_start)]}
    old_stamp = _read_stamp(run_dir)
    if {name: value for name, value in old_stamp.items() if name != FILES} == stamp:
        return
    start = time.monotonic()
    _check_no_other_files(run_dir, old_stamp)
    _say(f"warm start: supervised fine-tuning on demonstrations, once; its files go to {run_dir}")
    _empty(run_dir)
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        f"+recipe={job.warm_start}",
        f"run.dir={run_dir}",
        "run.prepare=null",
        f"model.hf_checkpoint={assets / 'model'}",
        f"data.train={assets / 'sft.jsonl'}",
        f"placement.device={cfg.placement.device}",
        "metrics.console=plain",
    ]
    deadline = Deadline("quickstart", "warm start", WARM_START_DEADLINE_S)
    if code := run_child("the warm start", command, deadline):
        raise WorkerError(f"the warm start ended with exit code {code}; its message is above")
    (run_dir / STAMP).write_text(json.dumps(stamp | {FILES: sorted(_files(run_dir))}))
    _say(f"warm start done in {time.monotonic() - start:.0f} s")


def _check_no_other_files(folder: Path, old_stamp: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` if ``folder`` may have files that the warm start of ``old_stamp`` did not write.

    An empty ``old_stamp`` means that no warm start has finished. All files in ``folder`` then count as files of a warm start.
    """
    if not old_stamp:
        return
    try:
        own_files = set(typed(old_stamp.get(FILES), list[str]))
    except ValueError:  # the stamp is damaged or of an earlier version
        own_files = None
    if own_files is None:
        problem, movable = f"{STAMP} does not list its files, so some may be yours", "the folder"
    elif foreign_files := sorted(_files(folder) - own_files):
        number = counted(len(foreign_files), "file")
        problem = f"the folder has {number} that the quickstart did not write, such as {foreign_files[0]}"
        movable = "them or the folder"
    else:
        return
    raise ConfigError(
        f"model.hf_checkpoint: the warm start in {folder} is out of date and would be removed, but {problem}; move {movable} "
        "away, or set run.prepare=null to train on the model as it is"
    )


def _files(folder: Path) -> set[str]:
    """Return the paths of all files in ``folder`` and its subfolders, relative to ``folder``."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(folder).as_posix() for path in paths}


def _empty(folder: Path) -> None:
    """Remove everything in the folder, which is created if missing, and leave a stamp that marks it as unfinished.

    Call ``_check_owned`` and ``_check_no_other_files`` first: they refuse a folder with files of the user. The stamp is
    written before the removal, so that the quickstart can resume an interrupted removal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP).write_text(UNFINISHED)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != STAMP:
            path.unlink()


def _stamp(job: PreparedJob) -> dict[str, object]:
    """Return the inputs that determine the data and the model: their specs, and digests of the code that writes them."""
    inputs = {
        "task": asdict(job.task),
        "model": asdict(job.model),
        "source": [_digest(Path(__file__).parent / name) for name in ("arithmetic.py", "model.py", "tool.py")],
    }
    return json.loads(json.dumps(inputs))  # in the form that json.loads returns


def _read_stamp(folder: Path) -> Mapping[str, object]:
    """Return the stamp of a finished folder; empty if the folder is unfinished, or if its stamp is missing or unreadable."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, object]", stamp) if isinstance(stamp, dict) else {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _say(text: str) -> None:
    sys.stdout.write(visible(f"quickstart: {text}\n"))
    sys.stdout.flush()
