"""When free memory is asked for before a collective and what follows: one ``MemoryPolicy`` for each op and process group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from slime_like.config.schema.collectives import GROUP_LABELS, OPS, canonical
from slime_like.errors import ConfigError
from slime_like.registry import nearest

CHECKS = ("auto", "always", "never", "every_n", "below")
ACTIONS = ("none", "trim", "clear", "raise")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FIELDS = ("checks", "every", "threshold", "hysteresis", "action", "budget")
ANY = "*"


@dataclass(frozen=True, slots=True)
class Threshold:
    """Free memory below which something is done: so many bytes, or a fraction of all there is."""

    num_bytes: int | None
    fraction: float | None

    @classmethod
    def parse(cls, key: str, value: object) -> Threshold:
        """``3GiB``, ``500MB``, or ``0.05`` for a twentieth. Raises ``ConfigError``."""
        text = str(value).strip()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
        if found is not None:
            number, unit = float(found[1]), found[2].upper()
            if unit in UNITS:
                return cls(int(number * UNITS[unit]), None)
            if not unit and 0 <= number < 1:
                return cls(None, number)
        raise ConfigError(
            f"{key}={text!r} is no amount of memory: give bytes such as 3GiB or 500MB, or a fraction such as 0.05"
        )

    def of(self, total: int) -> int:
        """In bytes, where ``total`` bytes exist."""
        return self.num_bytes if self.num_bytes is not None else int((self.fraction or 0.0) * total)

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:g} GiB" if self.num_bytes is not None else f"{self.fraction:g} of memory"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """See the keys of ``guard`` of the same names."""

    checks: str = "never"
    every: int = 100
    threshold: Threshold = Threshold(3 * 2**30, None)
    hysteresis: float = 0.25
    action: str = "clear"
    budget: float = 0.001

    def __str__(self) -> str:
        match self.checks:
            case "never":
                return "never"
            case "every_n":
                when = f"every {self.every}"
            case "auto":
                when = f"auto, at most {self.budget:.2%} of time"
            case _:
                when = self.checks
        return f"{when}: {self.action} below {self.threshold}"


@dataclass(frozen=True, slots=True)
class GuardSpec:
    """What a trainer rank's wrapper does. ``wrap=False``: there is none."""

    wrap: bool = False
    default: MemoryPolicy = MemoryPolicy()
    overrides: tuple[tuple[str, str, MemoryPolicy], ...] = ()  # (group or *, op or *, policy), the most general first
    memory: str = "auto"
    symmetric: bool = False
    nodes: int = 1  # that the role's ranks are on
    deadline_s: float = 3600.0
    ring: int = 1024
    release: bool = False
    profile: str | None = None  # where ranks write what each op took of memory; then nothing is guarded
    folder: str | None = None  # where the rings are; None: nobody reads them
    name: str = "rank"  # of the role, before its ranks' numbers

    def policy(self, op: str, group: str) -> MemoryPolicy:
        """For ``op`` in a group with label ``group``: what is said of the op there, else of the op, else of the group."""
        found = self.default
        for where, what, policy in self.overrides:
            if where in (ANY, group) and what in (ANY, op):
                found = policy
        return found


NO_GUARD = GuardSpec()  # no wrapper


def overrides(
    prefix: str, default: MemoryPolicy, ops: Mapping[str, Any], groups: Mapping[str, Any]
) -> tuple[tuple[str, str, MemoryPolicy], ...]:
    """``guard.ops`` and ``guard.groups`` as (group, op, policy), later ones going before earlier ones."""
    general: list[tuple[str, str, MemoryPolicy]] = []
    special: list[tuple[str, str, MemoryPolicy]] = []
    for label, value in groups.items():
        where = f"{prefix}groups.{label}"
        if label not in GROUP_LABELS.values():
            raise ConfigError(f"{where}: there is no group {label!r}: {nearest(label, GROUP_LABELS.values())}")
        own = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {"checks": value}
        inner = own.pop("ops", {})
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{where}.ops={inner!r} must be a mapping such as {{barrier: never}}")
        policy = _policy(where, default, own)
        if own:
            general.append((label, ANY, policy))
        special += [(label, op, one) for op, one in _of_ops(f"{where}.ops", policy, cast("Mapping[str, Any]", inner))]
    return (*general, *((ANY, op, one) for op, one in _of_ops(f"{prefix}ops", default, ops)), *special)


def _of_ops(where: str, default: MemoryPolicy, ops: Mapping[str, Any]) -> Iterator[tuple[str, MemoryPolicy]]:
    for name, value in ops.items():
        yield canonical(f"{where}.{name}", name).name, _policy(f"{where}.{name}", default, value)


def _policy(where: str, default: MemoryPolicy, value: object) -> MemoryPolicy:
    """A word is when to check; a mapping changes whichever fields it names."""
    given = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"checks": value}
    changes: dict[str, Any] = {}
    for name, item in given.items():
        if name not in FIELDS:
            raise ConfigError(
                f"{where}.{name} is unknown: {nearest(str(name), FIELDS)} (a policy has {', '.join(FIELDS)})"
            )
        changes[name] = _field(f"{where}.{name}", name, item)
    return replace(default, **changes)


def _field(where: str, name: str, value: object) -> object:
    choices = {"checks": CHECKS, "action": ACTIONS}.get(name)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"{where}={value!r} is not one of {', '.join(choices)}: {nearest(str(value), choices)}")
        return value
    if name == "threshold":
        return Threshold.parse(where, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or (name == "every" and value < 1):
        raise ConfigError(f"{where}={value!r} must be a number above 0")
    return int(value) if name == "every" else float(value)


def table(spec: GuardSpec) -> Iterator[tuple[str, str]]:
    """(op, policy) of every op, and (group: op, policy) where a group has its own."""
    for op in OPS:
        yield op.name, str(spec.policy(op.name, ""))
    for where, what, policy in spec.overrides:
        if where != ANY:
            yield f"{where}: {'every op' if what == ANY else what}", str(policy)
