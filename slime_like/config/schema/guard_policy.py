"""Policies of the memory guard per op and process group: when to query free memory, and what to do if it is low."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from slime_like.config.schema.collectives import GROUP_LABELS, OPS, canonical
from slime_like.errors import ConfigError
from slime_like.registry import nearest, not_one_of

CHECKS = ("auto", "always", "never", "every_n", "below")
ACTIONS = ("none", "trim", "clear", "raise")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FIELDS = ("checks", "every", "threshold", "hysteresis", "action", "budget")
ANY = "*"


@dataclass(frozen=True, slots=True)
class Threshold:
    """Free-memory threshold, in bytes or as a fraction of total memory."""

    num_bytes: int | None
    fraction: float | None

    @classmethod
    def parse(cls, key: str, value: object) -> Threshold:
        """Parse ``3GiB``, ``500MB`` or a fraction such as ``0.05``. Raises ``ConfigError`` on other text."""
        text = str(value).strip()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
        if match is not None:
            number, unit = float(match[1]), match[2].upper()
            if unit in UNITS:
                return cls(int(number * UNITS[unit]), None)
            if not unit and 0 <= number < 1:
                return cls(None, number)
        raise ConfigError(
            f"{key}={text!r} is not an amount of memory: give bytes such as 3GiB or 500MB, or a fraction such as 0.05"
        )

    def in_bytes(self, total: int) -> int:
        """Return the threshold in bytes for ``total`` bytes of memory."""
        return self.num_bytes if self.num_bytes is not None else int((self.fraction or 0.0) * total)

    def __str__(self) -> str:
        return f"{self.num_bytes / 2**30:g} GiB" if self.num_bytes is not None else f"{self.fraction:g} of memory"


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Memory policy of an op. The ``guard`` keys of the same names document its fields."""

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
                frequency = f"every {self.every}"
            case "auto":
                frequency = f"auto, at most {self.budget:.2%} of time"
            case _:
                frequency = self.checks
        return f"{frequency}: {self.action} below {self.threshold}"


@dataclass(frozen=True, slots=True)
class GuardSpec:
    """Settings of a trainer rank's wrapper around collectives. With ``wrap=False``, there is no wrapper."""

    wrap: bool = False
    default: MemoryPolicy = MemoryPolicy()
    overrides: tuple[tuple[str, str, MemoryPolicy], ...] = ()  # (group or *, op or *, policy), most general first
    memory: str = "auto"
    symmetric: bool = False
    nodes: int = 1  # number of nodes that the role's ranks run on
    deadline_s: float = 3600.0
    ring: int = 1024
    release: bool = False
    profile: str | None = None  # folder for measured memory per op; disables the guard
    folder: str | None = None  # folder of the ranks' records of recent ops; None: other processes cannot read them
    name: str = "rank"  # role name, prefix of rank numbers

    def policy(self, op: str, group: str) -> MemoryPolicy:
        """Return the policy of ``op`` in ``group``.

        The policy set for the op in that group applies, else that for the op, else that for the group, else the default.
        """
        match = self.default
        for on_group, on_op, candidate in self.overrides:
            if on_group in (ANY, group) and on_op in (ANY, op):
                match = candidate
        return match


NO_GUARD = GuardSpec()  # no wrapper


def overrides(
    prefix: str, default: MemoryPolicy, ops: Mapping[str, Any], groups: Mapping[str, Any]
) -> tuple[tuple[str, str, MemoryPolicy], ...]:
    """Return the entries (group, op, policy) of ``guard.ops`` and ``guard.groups``. Later entries take precedence.

    Raises ``ConfigError`` on an unknown group or op, or an invalid policy.
    """
    general: list[tuple[str, str, MemoryPolicy]] = []
    special: list[tuple[str, str, MemoryPolicy]] = []
    for label, value in groups.items():
        location = f"{prefix}groups.{label}"
        if label not in GROUP_LABELS.values():
            raise ConfigError(f"{location}: there is no group {label!r}: {nearest(label, GROUP_LABELS.values())}")
        fields_of_group = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {"checks": value}
        group_ops = fields_of_group.pop("ops", {})
        if not isinstance(group_ops, Mapping):
            raise ConfigError(f"{location}.ops={group_ops!r} must be a mapping such as {{barrier: never}}")
        policy = _policy(location, default, fields_of_group)
        if fields_of_group:
            general.append((label, ANY, policy))
        special += [
            (label, op, op_policy)
            for op, op_policy in _op_policies(f"{location}.ops", policy, cast("Mapping[str, Any]", group_ops))
        ]
    return (*general, *((ANY, op, op_policy) for op, op_policy in _op_policies(f"{prefix}ops", default, ops)), *special)


def _op_policies(prefix: str, default: MemoryPolicy, ops: Mapping[str, Any]) -> Iterator[tuple[str, MemoryPolicy]]:
    for name, value in ops.items():
        yield canonical(f"{prefix}.{name}", name).name, _policy(f"{prefix}.{name}", default, value)


def _policy(location: str, default: MemoryPolicy, value: object) -> MemoryPolicy:
    """Return ``default`` with the changes in ``value``: a string sets ``checks``, a mapping the fields it names.

    Raises ``ConfigError`` on an unknown field or an invalid value.
    """
    fields = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {"checks": value}
    changes: dict[str, Any] = {}
    for name, item in fields.items():
        if name not in FIELDS:
            raise ConfigError(
                f"{location}.{name} is unknown: {nearest(str(name), FIELDS)} (a policy has {', '.join(FIELDS)})"
            )
        changes[name] = _field(f"{location}.{name}", name, item)
    return replace(default, **changes)


def _field(location: str, name: str, value: object) -> object:
    choices = {"checks": CHECKS, "action": ACTIONS}.get(name)
    if choices is not None:
        if value not in choices:
            raise ConfigError(f"{location}={value!r} {not_one_of(str(value), choices)}")
        return value
    if name == "threshold":
        return Threshold.parse(location, value)
    lowest = 1 if name == "every" else 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < lowest:
        raise ConfigError(f"{location}={value!r} must be a number of at least {lowest}")
    return int(value) if name == "every" else float(value)


def table(spec: GuardSpec) -> Iterator[tuple[str, str]]:
    """Yield the policies of ``spec`` as pairs of an op and a policy.

    The first pairs have every op with its policy in groups without a policy of their own. The pairs after them have the
    policies set for groups; instead of an op, they begin with "group: op" or "group: every op".
    """
    for op in OPS:
        yield op.name, str(spec.policy(op.name, ""))
    for group, op_name, policy in spec.overrides:
        if group != ANY:
            yield f"{group}: {'every op' if op_name == ANY else op_name}", str(policy)
