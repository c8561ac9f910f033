"""faults.jsonl of a run: faults that were planted, engines that were lost, and what came of each."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_like.config.schema.faults import FATAL, REWARDS, WORKERS
from slime_like.errors import DataError
from slime_like.util.reading import InputFile, parse_json, reason, shown, typed

FILE = "faults.jsonl"
REWARD_SERVER = "reward server"  # as the target of a fault, and as what was lost


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A planted fault that struck."""

    fault: str  # as in chaos.faults
    target: str
    time: float  # unix seconds
    note: str = ""  # why it could not


@dataclass(frozen=True, slots=True)
class Recovery:
    """An engine that was lost, or a reward server that was out of reach. Times in unix seconds; 0: not yet."""

    engine: str  # its name, or REWARD_SERVER
    cause: str
    noticed: float
    up: float = 0.0  # started again
    joined: float = 0.0  # serves again
    version: int = -1  # of the weights it then had
    groups: int = 0  # that went on elsewhere; of a reward server: samples without its score

    @property
    def which(self) -> tuple[str, float]:
        """The same for every note of one loss."""
        return self.engine, self.noticed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of a recovery report."""

    what: str
    where: str
    found: str


def append(run_dir: Path, *notes: InjectedFault | Recovery) -> None:
    """Add lines to the run's file; whole ones, as the driver may be about to die."""
    if not notes:
        return
    text = "".join(json.dumps({"kind": type(note).__name__, **asdict(note)}) + "\n" for note in notes)
    try:
        with (run_dir / FILE).open("a") as file:
            file.write(text)
    except OSError as error:
        raise DataError(f"{run_dir / FILE} cannot be written ({reason(error)}): make room, or move it away") from error


def read(run_dir: Path) -> tuple[list[InjectedFault], list[Recovery]]:
    """What the file holds, all parts of the run together; nothing where there is none. Raises ``DataError``.

    A loss is noted as it is noticed, and again as it comes to its end: the newest note counts.
    """
    strikes: list[InjectedFault] = []
    recoveries: list[Recovery] = []
    path = run_dir / FILE
    if not os.path.lexists(path):
        return strikes, recoveries
    for number, line in enumerate(InputFile(path, fix="move it away").data().splitlines(), 1):
        try:
            note = typed(parse_json(line), dict[str, Any])
            if (kind := note.pop("kind", None)) == InjectedFault.__name__:
                strikes.append(typed(note, InjectedFault))
            elif kind == Recovery.__name__:
                recoveries.append(typed(note, Recovery))
            else:
                raise ValueError(f"kind is {shown(kind)}")
        except ValueError as error:
            raise DataError(f"{path}:{number} is no line of a fault ({reason(error)}): remove it") from error
    return strikes, newest(recoveries)


def newest(recoveries: Sequence[Recovery]) -> list[Recovery]:
    """The last note of each loss, which tells how far it has come."""
    return list({lost.which: lost for lost in recoveries}.values())


def outcomes(strikes: Sequence[InjectedFault], recoveries: Sequence[Recovery]) -> list[Outcome]:
    """Each planted fault with what it led to, then losses that nobody planted."""
    left = list(recoveries)
    found: list[Outcome] = []
    for at, strike in enumerate(strikes):
        after = min((s.time for s in strikes[at + 1 :] if s.target == strike.target), default=float("inf"))
        led = next((r for r in left if r.engine == strike.target and strike.time <= r.noticed < after), None)
        if led is not None:
            left.remove(led)
        what = _came_of(led, strike.time) if led is not None else strike.note or _no_loss(strike, recoveries, after)
        found.append(Outcome(strike.fault, strike.target, what))
    found += [Outcome(_first(lost.cause), lost.engine, _came_of(lost, lost.noticed)) for lost in left]
    return found


def _came_of(lost: Recovery, since: float) -> str:
    parts = (
        [f"noticed after {max(0.0, lost.noticed - since):.1f} s ({_first(lost.cause)})"]
        if since != lost.noticed
        else []
    )
    if lost.engine == REWARD_SERVER:
        parts.append(f"answers again after {lost.up - since:.1f} s" if lost.up else "has not answered since")
        return ", ".join([*parts, f"{lost.groups} samples without its score (reward.fallback)"])
    parts.append(f"up after {lost.up - since:.1f} s" if lost.up else "not up again")
    if lost.joined:
        weights = f"serves version {lost.version}" if lost.version >= 0 else "serves"
        parts.append(f"{weights} after {lost.joined - since:.1f} s")
    elif lost.up:
        parts.append("no push has reached it since")
    parts.append(f"{lost.groups} groups went on elsewhere")
    return ", ".join(parts)


def _no_loss(strike: InjectedFault, recoveries: Sequence[Recovery], after: float) -> str:
    """Why a fault led to no loss of an engine that was noticed before the next fault struck it, ``after``."""
    if strike.fault.partition(":")[0] in FATAL:
        return "ends the run, which the same command continues"
    if strike.fault.partition(":")[0] in REWARDS:
        return "no request failed, or that part of the run ended before one did"
    if strike.fault.partition(":")[0] in WORKERS:
        return "replaced at the next call"
    if any(r.engine == strike.target and r.noticed <= strike.time < (r.up or float("inf")) for r in recoveries):
        return "it was being restarted"
    if after < float("inf"):
        return "no engine was lost before the next fault struck it"
    return "no engine was lost, or that part of the run ended before it was noticed"


def _first(text: str) -> str:
    return text.splitlines()[0] if text else ""
