"""Read the files of a run as the run does, without its processes, and classify the outcome for a damaged file."""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import signal
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from slime_like.checkpoint.files import LATEST
from slime_like.cluster.plan.machine import Machine, probe_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.run.chaos import Chaos
from slime_like.cluster.run.rollout_state import check_cursor, check_num_managers, read_state
from slime_like.cluster.run.status import read_status
from slime_like.cluster.start.folder import claim_folder
from slime_like.cluster.start.inputs import load_inputs
from slime_like.cluster.start.resume import checkpoint_folder, first_rollout
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_files
from slime_like.config.schema.faults import ChaosConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.config.schema.run import MetricsConfig
from slime_like.data import faults
from slime_like.data.dump import load_groups
from slime_like.data.token_table import load_table
from slime_like.errors import SlimeLikeError
from slime_like.metrics.sinks import open_sinks
from slime_like.report.record import read_record
from slime_like.report.write import write_report
from tests.damage import damages
from tests.damage.world import FILES, NUM_MANAGERS, argv, build

LIMIT_S = 60
MAX_MESSAGE_LEN = 2000
NOBODY = 65534
AUTO_RESUME_FILES = ("config.yaml", LATEST)  # read only with run.resume=auto


class ReadOutcome(StrEnum):
    """Outcome of reading a damaged file."""

    REFUSED_BY_NAME = "refused, the file named"
    OTHER = "refused in other words"
    TRACEBACK = "traceback"
    HANG = "hang"
    SAME = "read as before"
    ASIDE = "read without the damaged lines, with a message"
    LEGAL = "another well-formed file"
    SILENT = "accepted, but changed"


FAULTS = (ReadOutcome.OTHER, ReadOutcome.TRACEBACK, ReadOutcome.HANG, ReadOutcome.SILENT)


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of damaging one file."""

    kind: str  # class of files
    file: str
    damage: str
    outcome: ReadOutcome
    message: str


class _Hang(BaseException):
    pass


class RunFiles:
    """Files of a run below ``root``, intact except while a trial damages one."""

    def __init__(self, root: Path, *, trainer: bool) -> None:
        self.root, self.trainer = root / "world", trainer
        self.damaged = b""  # content of the damaged file
        self.pristine = root / "pristine"
        root.chmod(0o777)
        self.cfg: TrainConfig = build(self.root)
        damages.restore(self.pristine, self.root)
        self.machine: Machine = probe_machine()
        self.before = {file: self._load(kind, file) for kind, files in FILES.items() for file in files}
        self._restore(*NUM_MANAGERS)

    def trial(self, kind: str, file: str, rng: Random) -> Trial:
        """Damage ``file`` at random, read the files as a run does, and restore it."""
        path = self.root / file
        method = rng.choice((damages.of_bytes, damages.of_fields, damages.of_fields, damages.of_entry))
        if method is damages.of_fields and path.suffix in ("", ".txt", ".jinja", ".distcp", ".pt"):
            method = damages.of_bytes
        damage = method(path, rng)
        try:
            outcome, message = self._judge(kind, file, damage)
        finally:
            is_of_run = file.partition("/")[0] in NUM_MANAGERS
            self._restore(*NUM_MANAGERS, *(() if is_of_run else (file,)))
        return Trial(kind, file, damage, outcome, message)

    def _judge(self, kind: str, file: str, damage: str) -> tuple[ReadOutcome, str]:
        output = io.StringIO()
        path = self.root / file
        self.damaged = path.read_bytes() if path.is_file() and not path.is_fifo() else b""
        try:
            with _limited(), redirect_stderr(output), redirect_stdout(output), _without_rights(damage == "unreadable"):
                after = self._load(kind, file)
        except SlimeLikeError as error:
            text = str(error)
            names = [Path(file).name, str(self.root / Path(file).parent)]
            names += [match[0] for match in re.finditer(r"[a-z_]+\.[a-z_.]+=|\+recipe=", text) if kind == "recipe"]
            # An error about a damaged tokenizer may name the data that it cannot encode.
            names += ["train.jsonl", "heldout.parquet"] if kind == "tokenizer files" else []
            is_clear = any(name in text for name in names) and len(text) < MAX_MESSAGE_LEN and text.count("\n") == 0
            return (ReadOutcome.REFUSED_BY_NAME if is_clear else ReadOutcome.OTHER), text
        except _Hang:
            return ReadOutcome.HANG, ""
        except BaseException as error:  # noqa: BLE001  the soak looks for these
            return ReadOutcome.TRACEBACK, "".join(traceback.format_exception(error)[-3:])
        if repr(after) == repr(self.before[file]) and damage != "missing":
            return ReadOutcome.SAME, ""
        return self._accepted(kind, file, after, output.getvalue()), output.getvalue()

    def _accepted(self, kind: str, file: str, after: Any, output: str) -> ReadOutcome:
        """Classify a read that returned a value different from that of the undamaged file."""
        if file.endswith(".jsonl") and kind in ("metrics.jsonl", "faults.jsonl, status.json"):
            is_reported, path = Path(file).name in output, self.root / file
            intact_lines = {*(self.pristine / file).read_bytes().splitlines()} & {*self.damaged.splitlines()}
            if intact_lines - {*(path.read_bytes().splitlines() if path.is_file() else ())}:
                return ReadOutcome.SILENT  # an intact line was lost
            if kind == "metrics.jsonl" and len(after[1]) < len(self.before[file][1]) and not is_reported:
                return ReadOutcome.SILENT  # steps were lost
            return ReadOutcome.ASIDE if is_reported else ReadOutcome.LEGAL
        if file.endswith(".json") and _same_json(self.damaged, (self.pristine / file).read_bytes()):
            return ReadOutcome.SAME  # only white space changed: ``after`` contains the bytes of the files
        if kind == "run.dir/config.yaml" and repr(after) == repr(self.before[file]):  # a checkpoint has its own copy
            return ReadOutcome.LEGAL
        strict_kinds = (
            LATEST,
            "checkpoint.json",
            "checkpoint's tensors",
            "state_N.json",
            "leftover, made and in-flight npz",
            "dumped rollouts",
            "run.dir/config.yaml",
        )
        return ReadOutcome.SILENT if kind in strict_kinds else ReadOutcome.LEGAL

    def _load(self, kind: str, file: str) -> Any:
        return _LOADERS[kind](self, self.root / file)

    def _restore(self, *names: str) -> None:
        for name in names:
            damages.restore(self.root / name, self.pristine / name)


def _same_json(data: bytes, other_data: bytes) -> bool:
    try:
        return json.loads(data) == json.loads(other_data)
    except ValueError:
        return False


# ---- reading as a run does ------------------------------------------------------------------------------------------
def _recipe(world: RunFiles, path: Path) -> Any:
    del path
    cfg = load_config(argv(world.root))
    return _plan(world, cfg)


def _plan(world: RunFiles, cfg: TrainConfig) -> Any:
    """Plan as ``train.py --plan`` does, and load the inputs that the driver reads."""
    check_files(cfg)
    plan = make_plan(cfg, world.machine)
    inputs = load_inputs(cfg, plan)
    prompts = [(p.text, p.label, p.metadata, p.token_ids.tolist()) for p in inputs.source.prompts]
    heldout = {
        name: [(p.text, p.label, p.token_ids.tolist()) for p in dataset] for name, dataset in inputs.heldout.items()
    }
    return asdict(cfg), plan, prompts, heldout, inputs.stop_token_ids, inputs.tokenizer.decode([3, 12, 4])


def _model(world: RunFiles, path: Path) -> Any:
    """Plan, and read the model folder as a trainer rank does."""
    plan = _plan(world, world.cfg)
    if not world.trainer:
        return plan
    from slime_like.train.megatron.families.hf import HFFolder
    from slime_like.train.megatron.families.qwen3 import Qwen3

    folder = HFFolder(path.parent)
    family = Qwen3(folder.config(), 1)
    family.transformer_fields()
    sums = [float(tensor.sum()) for weight in family.weights().values() for tensor in weight.read(folder)]
    return plan, family.hf.to_dict(), sums


def _resume(world: RunFiles, path: Path) -> Any:
    """Resume the run: read everything that the driver and the rollout manager read from its folder."""
    folder_name = path.relative_to(world.root).parts[0]
    cfg, run_dir = world.cfg, world.root / folder_name
    if path.name not in AUTO_RESUME_FILES:  # resuming from a checkpoint path does not read the run's config.yaml
        cfg = replace(cfg, run=replace(cfg.run, dir=str(run_dir), resume=str(run_dir / "checkpoints")))
    plan = make_plan(cfg, world.machine)
    first = first_rollout(cfg, run_dir)
    inputs = load_inputs(cfg, plan)
    with claim_folder(cfg, run_dir):
        sink = open_sinks(MetricsConfig(console="plain"), run_dir, first_step=first, num_steps=10)
        Chaos(ChaosConfig(), run_dir, {}).plan(10)
        sink.close()
    if first == 0:
        return first
    folder = checkpoint_folder(cfg, run_dir)
    state = read_state(folder, first)
    check_num_managers(folder, first, NUM_MANAGERS[folder_name])
    check_cursor(folder, first, inputs.source)
    inputs.source.next(3)
    group_files = sorted((folder / "rollout").glob("*.npz"))
    logs = [(run_dir / "metrics.jsonl").read_text(), faults.read(run_dir)]
    manifest = (folder / f"iter_{first:07d}").glob("[!m]*")
    return (
        first,
        state,
        [load_groups(path) for path in group_files],
        logs,
        [path.read_bytes() for path in sorted(manifest)],
    )


def _status(world: RunFiles, path: Path) -> Any:
    return read_status(path.parent), _resume(world, path)


def _dumps(world: RunFiles, path: Path) -> Any:
    """Load the dump as a replaying run does, and write a report."""
    value = load_table(path) if path.name.startswith("tokens") else load_groups(path)
    write_report(world.root / "run")
    return value


def _log(world: RunFiles, path: Path) -> Any:
    """Resume with the log, then write its report."""
    config = _resume(world, path)
    rows = read_record(path.parent).rows
    write_report(path.parent)
    return config, rows


_PLANNED = ("generation_config.json", "tokenizer files", "data (jsonl, parquet)")
_LOADERS: dict[str, Callable[[RunFiles, Path], Any]] = {
    **dict.fromkeys(FILES, _resume),
    **dict.fromkeys(_PLANNED, lambda world, path: _plan(world, world.cfg)),
    "config.json": _model,
    "safetensors and index": _model,
    "recipe": _recipe,
    "dumped rollouts": _dumps,
    "metrics.jsonl": _log,
    "faults.jsonl, status.json": _status,
}


@contextmanager
def _limited() -> Generator[None]:
    def raise_timeout(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _without_rights(enabled: bool) -> Generator[None]:
    """Read files as user nobody, because root can read files regardless of their mode."""
    if not enabled or os.geteuid():
        yield
        return
    setfsuid = ctypes.CDLL(None).setfsuid
    setfsuid(NOBODY)
    try:
        yield
    finally:
        setfsuid(0)
