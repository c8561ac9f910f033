"""faults.jsonl of a run: injected faults, losses and recoveries of engines, and injected outages of the reward server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from slime_like.config.schema.faults import FATAL, REWARDS, WORKERS
from slime_like.errors import DataError
from slime_like.util.counted import counted
from slime_like.util.reading import InputFile, abbreviate, parse_json, reason, typed

FILE = "faults.jsonl"
REWARD_SERVER = "reward server"  # target of a fault, and name of the lost component
_append_lock = threading.Lock()  # a failed append must not remove the records of another thread


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Record of an injected fault."""

    fault: str  # as in chaos.faults
    target: str
    time: float  # unix seconds
    note: str = ""  # reason if the injection failed

    @property
    def key(self) -> tuple[str, float]:
        """Return the key that all records of one injection have in common."""
        return self.fault, self.time


@dataclass(frozen=True, slots=True)
class Recovery:
    """Record of a lost engine or an injected outage of the reward server.

    Times are unix seconds; ``up`` and ``joined`` are 0 until they happen.
    """

    engine: str  # its name, or REWARD_SERVER
    cause: str
    noticed: float
    up: float = 0.0  # when its process was up again
    joined: float = 0.0  # when it served again
    version: int = -1  # weight version when it rejoined
    groups: int = 0  # groups moved to other engines; for the reward server, samples that it did not score

    @property
    def key(self) -> tuple[str, float]:
        """Return the key that all records of one loss have in common."""
        return self.engine, self.noticed


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one injected fault, or of a loss without one; a line of the recovery report."""

    fault: str  # as in chaos.faults, or the cause of a loss that no injected fault explains
    target: str
    result: str


def append(run_dir: Path, *records: InjectedFault | Recovery) -> None:
    """Append records to the run's file in a single write, because a fault may kill the driver immediately afterwards.

    Raises ``DataError`` if the file cannot be written; a part already written is removed if possible.
    """
    if not records:
        return
    text = "".join(json.dumps({"kind": type(record).__name__, **asdict(record)}) + "\n" for record in records)
    try:
        with _append_lock, (run_dir / FILE).open("ab", buffering=0) as file:
            _write_all(file, text.encode())
    except OSError as error:
        raise DataError(
            f"{run_dir / FILE} cannot be written ({reason(error)}): free some space, or move the file away"
        ) from error


def _write_all(file: FileIO, data: bytes) -> None:
    """Append all of ``data`` to an unbuffered file. On an ``OSError``, remove the part already written if possible; re-raise."""
    size = os.fstat(file.fileno()).st_size
    try:
        while data:  # a write ends early if the disk becomes full; the next one raises the error
            data = data[file.write(data) :]
    except OSError:
        with suppress(OSError):  # the error of the write matters more
            file.truncate(size)
        raise


def read(run_dir: Path) -> tuple[list[InjectedFault], list[Recovery]]:
    """Return all injected faults and recoveries of a run, including those before a resume; empty if the run has no file.

    A loss has a record for each rollout in which it was noticed or changed, and an injection that failed may have a second
    record with the reason; the newest one of each is returned. Raises ``DataError`` if the file cannot be read or a line is
    not a record; the error names the line.
    """
    injections: list[InjectedFault] = []
    recoveries: list[Recovery] = []
    path = run_dir / FILE
    if not os.path.lexists(path):
        return injections, recoveries
    for number, line in enumerate(InputFile(path, fix="move it away").data().splitlines(), 1):
        try:
            fields = typed(parse_json(line), dict[str, Any])
            if (kind := fields.pop("kind", None)) == InjectedFault.__name__:
                injections.append(typed(fields, InjectedFault))
            elif kind == Recovery.__name__:
                recoveries.append(typed(fields, Recovery))
            else:
                raise ValueError(f"kind is {abbreviate(kind)}")
        except ValueError as error:
            raise DataError(f"{path}:{number} is not a fault record ({reason(error)}): remove the line") from error
    return newest(injections), newest(recoveries)


def newest[Record: (InjectedFault, Recovery)](records: Sequence[Record]) -> list[Record]:
    """Return the latest record of each injection or loss."""
    return list({record.key: record for record in records}.values())


def outcomes(injections: Sequence[InjectedFault], recoveries: Sequence[Recovery]) -> list[Outcome]:
    """Return an outcome for each injected fault, then one for each loss that no injected fault explains.

    A fault of an engine explains the engine's first loss that is noticed after this fault and before the next fault of the
    same engine. The time between fault and loss is not limited; the result states it in seconds.
    """
    unmatched_recoveries = list(recoveries)
    results: list[Outcome] = []
    for index, injection in enumerate(injections):
        next_time = min((s.time for s in injections[index + 1 :] if s.target == injection.target), default=float("inf"))
        effects = [
            r for r in unmatched_recoveries if r.engine == injection.target and injection.time <= r.noticed < next_time
        ]
        if injection.target != REWARD_SERVER:
            effects = effects[:1]
        for effect in effects:
            unmatched_recoveries.remove(effect)
        result = (
            _describe_recovery(_merge_records(effects), injection.time)
            if effects
            else injection.note or _no_loss(injection, recoveries, next_time)
        )
        results.append(Outcome(injection.fault, injection.target, result))
    results += [
        Outcome(_first_line(recovery.cause), recovery.engine, _describe_recovery(recovery, recovery.noticed))
        for recovery in unmatched_recoveries
    ]
    return results


def _merge_records(recoveries: Sequence[Recovery]) -> Recovery:
    """Return a single record that merges all records caused by one fault.

    A fault of an engine causes one record. An outage of the reward server causes one for each rollout manager whose
    requests failed.
    """
    is_up = all(recovery.up for recovery in recoveries)
    return replace(
        min(recoveries, key=lambda recovery: recovery.noticed),
        up=max(recovery.up for recovery in recoveries) if is_up else 0.0,
        groups=sum(recovery.groups for recovery in recoveries),
    )


def _describe_recovery(recovery: Recovery, since: float) -> str:
    """Return a description of a recovery's steps, with times counted from ``since``."""
    parts = (
        [f"noticed after {max(0.0, recovery.noticed - since):.1f} s ({_first_line(recovery.cause)})"]
        if since != recovery.noticed
        else []
    )
    if recovery.engine == REWARD_SERVER:
        parts.append(f"answers again after {recovery.up - since:.1f} s" if recovery.up else "has not answered since")
        return ", ".join([*parts, f"{counted(recovery.groups, 'sample')} without its score (reward.fallback)"])
    parts.append(f"up after {recovery.up - since:.1f} s" if recovery.up else "not up again")
    if recovery.joined:
        weights = f"serves version {recovery.version}" if recovery.version >= 0 else "serves"
        parts.append(f"{weights} after {recovery.joined - since:.1f} s")
    elif recovery.up:
        parts.append("no push has reached it since")
    parts.append(f"{counted(recovery.groups, 'group')} moved to another engine")
    return ", ".join(parts)


def _no_loss(injection: InjectedFault, recoveries: Sequence[Recovery], next_time: float) -> str:
    """Return the reason why an injected fault has no recorded loss.

    ``next_time`` is the time of the next fault of the same target, infinity if there is none. Losses of the target from then
    on are attributed to the next fault.
    """
    if injection.fault.partition(":")[0] in FATAL:
        return "ends the run; the same command resumes it"
    if injection.fault.partition(":")[0] in REWARDS:
        return "no request failed, or that part of the run ended before one did"
    if injection.fault.partition(":")[0] in WORKERS:
        return "replaced at the next call"
    if any(r.engine == injection.target and r.noticed <= injection.time < (r.up or float("inf")) for r in recoveries):
        return "it was being restarted"
    if next_time < float("inf"):
        return "no engine was lost before the next fault was injected"
    return "no engine was lost, or that part of the run ended before it was noticed"


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
