"""What a run reads, read as the run does, without its processes; and what became of a damaged file."""

from __future__ import annotations

import ctypes
import io
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
from slime_like.cluster.run.rollouts import check_cursor, read_state
from slime_like.cluster.run.status import read_status
from slime_like.cluster.start.folder import claimed
from slime_like.cluster.start.inputs import load_inputs
from slime_like.cluster.start.resume import checkpoint_folder, first_rollout
from slime_like.config.load.loader import load_config
from slime_like.config.rules.files import check_files
from slime_like.config.schema.faults import ChaosConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.config.schema.run import MetricsConfig
from slime_like.data import faults
from slime_like.data.dump import load_groups
from slime_like.data.token_view import load_view
from slime_like.errors import SlimeLikeError
from slime_like.metrics.sinks import open_sinks
from slime_like.report.record import read_record
from slime_like.report.write import write_report
from tests.damage import damages
from tests.damage.world import FILES, argv, build

LIMIT_S = 60
LONGEST = 2000  # characters of a message that a person reads
NOBODY = 65534
OWN = ("config.yaml", LATEST)  # files that only a run which goes on by itself reads


class Outcome(StrEnum):
    """What became of a damaged file."""

    NAMED = "refused, the file named"
    OTHER = "refused in other words"
    TRACEBACK = "traceback"
    HANG = "hang"
    SAME = "read as before"
    ASIDE = "read without the damaged lines, which it says"
    LEGAL = "another well-formed file"
    SILENT = "accepted, but changed"


FAULTS = (Outcome.OTHER, Outcome.TRACEBACK, Outcome.HANG, Outcome.SILENT)


@dataclass(frozen=True, slots=True)
class Trial:
    """One damaged file."""

    kind: str  # class of files
    file: str
    damage: str
    outcome: Outcome
    message: str


class _Hang(BaseException):
    pass


class World:
    """Files of a run below ``root``, whole but while a trial damages one."""

    def __init__(self, root: Path, *, trainer: bool) -> None:
        self.root, self.trainer = root / "world", trainer
        self.damaged = b""  # the file of the trial as its reader finds it
        self.pristine = root / "pristine"
        root.chmod(0o777)
        self.cfg: TrainConfig = build(self.root)
        damages.restore(self.pristine, self.root)
        self.machine: Machine = probe_machine()
        self.before = {file: self._load(kind, file) for kind, files in FILES.items() for file in files}
        self._restore("run")

    def trial(self, kind: str, file: str, rng: Random) -> Trial:
        """Damage ``file`` as ``rng`` says, read what a run reads of it, mend it."""
        path = self.root / file
        how = rng.choice((damages.of_bytes, damages.of_fields, damages.of_fields, damages.of_entry))
        if how is damages.of_fields and path.suffix in ("", ".txt", ".jinja", ".distcp", ".pt"):
            how = damages.of_bytes
        damage = how(path, rng)
        try:
            outcome, message = self._judge(kind, file, damage)
        finally:
            self._restore("run" if file.startswith("run/") else file)
            if file.startswith("model/") or not file.startswith("run/"):
                self._restore("run")
        return Trial(kind, file, damage, outcome, message)

    def _judge(self, kind: str, file: str, damage: str) -> tuple[Outcome, str]:
        said = io.StringIO()
        path = self.root / file
        self.damaged = path.read_bytes() if path.is_file() and not path.is_fifo() else b""
        try:
            with _limited(), redirect_stderr(said), redirect_stdout(said), _without_rights(damage == "unreadable"):
                after = self._load(kind, file)
        except SlimeLikeError as error:
            text = str(error)
            names = [Path(file).name, str(self.root / Path(file).parent)]
            names += [found[0] for found in re.finditer(r"[a-z_]+\.[a-z_.]+=|\+recipe=", text) if kind == "recipe"]
            names += ["train.jsonl", "heldout.parquet"] if kind == "tokenizer files" else []  # which it cannot encode
            clear = any(name in text for name in names) and len(text) < LONGEST and text.count("\n") == 0
            return (Outcome.NAMED if clear else Outcome.OTHER), text
        except _Hang:
            return Outcome.HANG, ""
        except BaseException as error:  # noqa: BLE001  what the soak looks for
            return Outcome.TRACEBACK, "".join(traceback.format_exception(error)[-3:])
        if repr(after) == repr(self.before[file]) and damage != "missing":
            return Outcome.SAME, ""
        return self._accepted(kind, file, after, said.getvalue()), said.getvalue()

    def _accepted(self, kind: str, file: str, after: Any, said: str) -> Outcome:
        """Whether another value than the undamaged file's may be taken."""
        if file.endswith(".jsonl") and kind in ("metrics.jsonl", "faults.jsonl, status.json"):
            said_so, path = Path(file).name in said, self.root / file
            whole = {*(self.pristine / file).read_bytes().splitlines()} & {*self.damaged.splitlines()}
            if whole - {*(path.read_bytes().splitlines() if path.is_file() else ())}:
                return Outcome.SILENT  # a line that nothing was wrong with is gone
            if kind == "metrics.jsonl" and len(after[1]) < len(self.before[file][1]) and not said_so:
                return Outcome.SILENT  # steps are gone
            return Outcome.ASIDE if said_so else Outcome.LEGAL
        if kind == "run.dir/config.yaml" and repr(after) == repr(self.before[file]):  # a checkpoint has its own copy
            return Outcome.LEGAL
        own = (
            LATEST,
            "checkpoint.json",
            "checkpoint's tensors",
            "state_N.json",
            "leftover, made and in-flight npz",
            "dumped rollouts",
            "run.dir/config.yaml",
        )
        return Outcome.SILENT if kind in own else Outcome.LEGAL

    def _load(self, kind: str, file: str) -> Any:
        return _LOADERS[kind](self, self.root / file)

    def _restore(self, name: str) -> None:
        damages.restore(self.root / name, self.pristine / name)


# ---- as a run reads --------------------------------------------------------------------------------------------------
def _recipe(world: World, path: Path) -> Any:
    del path
    cfg = load_config(argv(world.root))
    return _plan(world, cfg)


def _plan(world: World, cfg: TrainConfig) -> Any:
    """``train.py --plan``, and the inputs that the driver reads."""
    check_files(cfg)
    plan = make_plan(cfg, world.machine)
    inputs = load_inputs(cfg, plan)
    prompts = [(p.text, p.label, p.metadata, p.token_ids.tolist()) for p in inputs.source.prompts]
    heldout = {name: [(p.text, p.label, p.token_ids.tolist()) for p in found] for name, found in inputs.heldout.items()}
    return asdict(cfg), plan, prompts, heldout, inputs.stop_token_ids, inputs.tokenizer.decode([3, 12, 4])


def _model(world: World, path: Path) -> Any:
    """The plan, and what a trainer rank reads of the model folders."""
    found = _plan(world, world.cfg)
    if not world.trainer:
        return found
    from slime_like.train.megatron.families.hf import HFFolder
    from slime_like.train.megatron.families.qwen3 import Qwen3

    folder = HFFolder(path.parent)
    family = Qwen3(folder.config(), 1)
    family.transformer_fields()
    sums = [float(tensor.sum()) for weight in family.weights().values() for tensor in weight.read(folder)]
    return found, family.hf.to_dict(), sums


def _resume(world: World, path: Path) -> Any:
    """The start of a run that goes on: all that the driver and the manager read of its folder."""
    cfg, run_dir = world.cfg, world.root / "run"
    if path.name not in OWN:  # a checkpoint that is named by its path is resumed without the run's config.yaml
        cfg = replace(cfg, run=replace(cfg.run, resume=str(run_dir / "checkpoints")))
    plan = make_plan(cfg, world.machine)
    first = first_rollout(cfg, run_dir)
    inputs = load_inputs(cfg, plan)
    with claimed(cfg, run_dir):
        sink = open_sinks(MetricsConfig(console="plain"), run_dir, first_step=first, num_steps=10)
        Chaos(ChaosConfig(), run_dir, {}).plan(10)
        sink.close()
    if first == 0:
        return first
    folder = checkpoint_folder(cfg, run_dir)
    state = read_state(folder, first)
    check_cursor(folder, first, inputs.source)
    inputs.source.next(3)
    kept = sorted((folder / "rollout").glob("*.npz"))
    rest = [(run_dir / "metrics.jsonl").read_text(), faults.read(run_dir)]
    manifest = (folder / f"iter_{first:07d}").glob("[!m]*")
    return first, state, [load_groups(path) for path in kept], rest, [path.read_bytes() for path in sorted(manifest)]


def _status(world: World, path: Path) -> Any:
    return read_status(path.parent), _resume(world, path)


def _dumps(world: World, path: Path) -> Any:
    """A report, and a run that replays the dump."""
    found = load_view(path) if path.name.startswith("tokens") else load_groups(path)
    write_report(world.root / "run")
    return found


def _log(world: World, path: Path) -> Any:
    """A run that goes on past the log, and then its report."""
    found = _resume(world, path)
    rows = read_record(path.parent).rows
    write_report(path.parent)
    return found, rows


_PLANNED = ("generation_config.json", "tokenizer files", "data (jsonl, parquet)")
_LOADERS: dict[str, Callable[[World, Path], Any]] = {
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
    def late(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _without_rights(wanted: bool) -> Generator[None]:
    """Read files as nobody: root reads also those whose mode forbids it."""
    if not wanted or os.geteuid():
        yield
        return
    setfsuid = ctypes.CDLL(None).setfsuid
    setfsuid(NOBODY)
    try:
        yield
    finally:
        setfsuid(0)


def digits(text: str) -> str:
    """A message without its numbers and paths, to count messages of one sort."""
    return re.sub(r"/\S+|\d+", "#", text)
