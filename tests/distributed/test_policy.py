"""Memory policies: ops before which memory is queried and the actions taken, for any memory curve."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.cluster.plan.guard import guard_lines, guard_spec, memory_source, releases
from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.config.schema.base import Config
from slime_like.config.schema.collectives import OPS, SLIME_SKIPS, canonical
from slime_like.config.schema.guard_policy import ACTIONS, CHECKS, GuardSpec, MemoryPolicy, Threshold
from slime_like.distributed.forensics.ring import GroupInfo
from slime_like.distributed.guard import memory_guard as guard_module
from slime_like.distributed.guard.counters import Counter, GroupRecord, counter_type
from slime_like.distributed.guard.memory_guard import NEVER, Guard, SymmetricActions
from slime_like.distributed.guard.query_schedule import MAX_OVERDRAFT
from slime_like.errors import ConfigError, MemoryShortage

GIB = 2**30
QUICKSTART = ["+recipe=quickstart"]


@dataclass
class Simulated:
    """Simulated memory source; each query takes ``cost`` ns of a simulated clock."""

    name: str = "simulated"
    total: int = 16 * GIB
    free_bytes: int = 8 * GIB
    cost: int = 0
    now: int = 0
    reclaimable: int = 0  # bytes that a trim or clear frees
    num_queries: int = 0
    actions: list[str] = field(default_factory=list[str])

    def clock(self) -> int:
        return self.now

    def free(self) -> int:
        self.num_queries += 1
        self.now += self.cost - self.cost // 2
        return self.free_bytes

    def process_bytes(self) -> int:
        self.now += self.cost // 2
        return self.total - self.free_bytes

    def trim(self) -> None:
        self.actions.append("trim")
        self.free_bytes += self.reclaimable

    def clear(self) -> None:
        self.actions.append("clear")
        self.free_bytes += self.reclaimable


@contextlib.contextmanager
def with_clock(memory: Simulated) -> Generator[None]:
    """Run the guard by the clock of this memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard_module.time, "perf_counter_ns", memory.clock)
        yield


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Simulated], Simulated]:
    def follow(memory: Simulated) -> Simulated:
        monkeypatch.setattr(guard_module.time, "perf_counter_ns", memory.clock)
        return memory

    return follow


def counter(policy: MemoryPolicy, op: str = "all_reduce") -> Counter:
    return counter_type()(canonical("test", op), GroupRecord(GroupInfo(0, "1", "tp", (0, 1))), policy, 0)


def call(guard: Guard, op_counter: Counter, now: int = 1) -> None:
    """Run the wrapper's check before an op."""
    op_counter.calls += 1
    if now >= op_counter.check_at:
        guard.check(op_counter, now)


# ---- policies x memory -----------------------------------------------------------------------------------------------
@given(
    checks=st.sampled_from(CHECKS),
    action=st.sampled_from(ACTIONS),
    every=st.integers(1, 5),
    limits=st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    levels=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    op=st.sampled_from([op.name for op in OPS]),
)
def test_queries_and_actions_follow_the_policy(
    checks: str, action: str, every: int, limits: tuple[int, float], levels: list[int], op: str
) -> None:
    """Memory stays at each level for one op, under ``auto`` long enough for at least one query within its budget."""
    threshold, hysteresis = limits
    policy = MemoryPolicy(checks, every, Threshold(threshold * GIB, None), hysteresis, action)
    memory, op_counter = Simulated(total=32 * GIB, cost=1_000), counter(policy, op)
    guard = Guard(memory)
    guard.add_counter(op_counter)
    in_shortage, num_shortages, num_queries = False, 0, 0
    with with_clock(memory):
        for index, gib in enumerate(levels):
            memory.free_bytes = gib * GIB
            is_queried = checks in ("always", "below", "auto") or (checks == "every_n" and index % every == 0)
            acted = is_queried and gib < threshold and not (checks in ("below", "auto") and in_shortage)
            num_queries, num_shortages = num_queries + is_queried, num_shortages + acted
            num_errors = 0
            for _ in range(60 if checks == "auto" else 1):
                memory.now += 400_000
                try:
                    call(guard, op_counter, memory.now)
                except MemoryShortage as shortage:
                    num_errors += 1
                    assert re.match(rf"{gib:.2f} GiB .*{op} in group tp.*threshold {threshold} GiB", str(shortage))
            assert num_errors == (acted and action == "raise")
            if is_queried:
                in_shortage = acted or (in_shortage and gib < threshold * (1 + hysteresis))
            assert op_counter.shortages == num_shortages
            assert op_counter.checks == num_queries or (checks == "auto" and op_counter.checks > num_queries)
    assert memory.actions == ([action] * num_shortages if action in ("trim", "clear") else [])
    assert op_counter.clears == len(memory.actions)
    assert (op_counter.check_at == NEVER) == (checks == "never")


def test_freed_memory_is_counted() -> None:
    memory, op_counter = (
        Simulated(free_bytes=2 * GIB, reclaimable=GIB),
        counter(MemoryPolicy(checks="always", action="clear")),
    )
    guard = Guard(memory)
    guard.add_counter(op_counter)
    call(guard, op_counter)
    call(guard, op_counter)
    assert (op_counter.clears, op_counter.freed, guard.min_free) == (1, GIB, 2 * GIB)


def test_a_fraction_is_of_total_memory() -> None:
    assert Threshold.parse("k", 0.25).in_bytes(16 * GIB) == 4 * GIB
    assert Threshold.parse("k", "1.5GiB").in_bytes(7) == 3 * GIB // 2
    assert Threshold.parse("k", "3 GB").in_bytes(7) == 3 * 10**9
    for bad in ("3", "-1GiB", "GiB", "3GiX", "1.0", None):
        with pytest.raises(ConfigError, match="give bytes such as 3GiB"):
            Threshold.parse("guard.threshold", bad)


# ---- auto ------------------------------------------------------------------------------------------------------------
def test_expensive_queries_are_made_less_often(clocked: Callable[[Simulated], Simulated]) -> None:
    num_checks: dict[int, int] = {}
    for cost in (10_000, 8_000_000):
        memory = clocked(Simulated(cost=cost))
        op_counter, guard = counter(MemoryPolicy(checks="auto")), Guard(memory)
        guard.add_counter(op_counter)
        while memory.now < 100 * 10**9:
            call(guard, op_counter, memory.now)
            memory.now += 1_000_000
        num_checks[cost] = op_counter.checks
        assert op_counter.check_ns <= 0.001 * memory.now + MAX_OVERDRAFT * cost
    assert 5_000 < num_checks[10_000] <= 10_100
    assert 8 <= num_checks[8_000_000] <= 14


def test_all_counters_share_the_budget_of_auto(clocked: Callable[[Simulated], Simulated]) -> None:
    memory = clocked(Simulated(cost=1_000_000))
    op_counters = [counter(MemoryPolicy(checks="auto"), op) for op in ("all_reduce", "broadcast", "barrier")]
    guard = Guard(memory)
    for op_counter in op_counters:
        guard.add_counter(op_counter)
    for _, op_counter in zip(range(30_000), itertools.cycle(op_counters), strict=False):
        call(guard, op_counter, memory.now)
        memory.now += 1_000_000
    assert sum(op_counter.check_ns for op_counter in op_counters) <= 0.001 * memory.now + 2 * memory.cost
    assert sum(op_counter.checks for op_counter in op_counters) >= 25


def test_auto_acts_once_per_shortage(clocked: Callable[[Simulated], Simulated]) -> None:
    memory = clocked(Simulated(free_bytes=2 * GIB, cost=1_000))
    op_counter, guard = counter(MemoryPolicy(checks="auto")), Guard(memory)
    guard.add_counter(op_counter)
    for free_gib in (2, 2, 3.2, 2, 5, 2):
        memory.free_bytes = int(free_gib * GIB)
        for _ in range(3_000):
            call(guard, op_counter, memory.now)
            memory.now += 1_000
    assert memory.actions == ["clear", "clear"]  # at first, and after memory had recovered to 5 GiB


# ---- symmetric actions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("action", ["trim", "clear", "raise"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_shortage_on_one_rank(action: str, symmetric: bool, tmp_path: Path) -> None:
    policy = MemoryPolicy(checks="always", action=action)
    ranks: list[tuple[Simulated, Guard, Counter]] = []
    for free_gib in (8, 2, 8):
        memory = Simulated(free_bytes=free_gib * GIB, reclaimable=4 * GIB)
        guard = Guard(memory, SymmetricActions(tmp_path / "requests") if symmetric else None)
        op_counter = counter(policy)
        guard.add_counter(op_counter)
        ranks.append((memory, guard, op_counter))
    outcomes: list[list[str]] = []
    for _ in range(3):
        outcomes.append([])
        for memory, guard, op_counter in ranks:
            before = len(memory.actions)
            try:
                call(guard, op_counter)
                outcomes[-1] += memory.actions[before:] or ["nothing"]
            except MemoryShortage:
                memory.free_bytes = 8 * GIB
                outcomes[-1].append("raise")
    local_outcomes = [["nothing", action, "nothing"], ["nothing"] * 3, ["nothing"] * 3]
    group_outcomes = [["nothing", action, action], [action, "nothing", "nothing"], ["nothing"] * 3]
    assert outcomes == (group_outcomes if symmetric else local_outcomes)


def test_never_still_follows_a_group_decision(tmp_path: Path) -> None:
    guards = [Guard(Simulated(), SymmetricActions(tmp_path / "requests")) for _ in range(2)]
    op_counters = [counter(MemoryPolicy(checks="never")) for _ in guards]
    for guard, op_counter in zip(guards, op_counters, strict=True):
        guard.add_counter(op_counter)
    actions = guards[0].symmetric_actions
    assert actions is not None
    actions.publish("trim")
    for _ in range(2):
        for guard, op_counter in zip(guards, op_counters, strict=True):
            call(guard, op_counter)
    assert [op_counter.clears for op_counter in op_counters] == [0, 1]


# ---- config ----------------------------------------------------------------------------------------------------------
def spec_of(*argv: str) -> GuardSpec:
    return guard_spec(load_config([*QUICKSTART, *argv], files=False), "trainer")


def test_presets() -> None:
    slime = spec_of("guard=slime")
    never = {op.name for op in OPS if slime.policy(op.name, "tp").checks == "never"}
    assert never == {canonical("k", name).name for name in SLIME_SKIPS}
    assert len(never) == 8
    all_reduce_policy = slime.policy("all_reduce", "tp")
    assert (all_reduce_policy.checks, all_reduce_policy.threshold.in_bytes(0), all_reduce_policy.action) == (
        "always",
        3 * GIB,
        "clear",
    )
    always, auto = spec_of("guard=always"), spec_of()
    assert {always.policy(op.name, "dp").checks for op in OPS} == {"always"}
    assert {auto.policy(op.name, "dp").checks for op in OPS} == {"auto"}
    assert not spec_of("guard=off").wrap
    assert auto.wrap


def test_more_specific_settings_take_precedence() -> None:
    spec = spec_of(
        "guard.checks=every_n",
        "guard.every=7",
        "guard.groups.dp={checks: always, action: trim, ops: {broadcast: below}}",
        "guard.ops.allreduce=never",
        "guard.ops.broadcast={checks: always, threshold: 0.5}",
    )
    assert spec.policy("barrier", "tp").checks == "every_n"
    assert spec.policy("barrier", "dp") == MemoryPolicy(checks="always", every=7, action="trim")
    assert spec.policy("all_reduce", "tp").checks == "never"
    assert spec.policy("all_reduce", "dp").checks == "never"
    assert spec.policy("broadcast", "tp").threshold == Threshold(None, 0.5)
    assert spec.policy("broadcast", "dp") == MemoryPolicy(checks="below", every=7, action="trim")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("guard.ops.all_redcue=never", r"guard\.ops\.all_redcue: there is no op .*did you mean 'all_reduce'.*barrier"),
        ("guard.ops.barrier=sometimes", r"guard\.ops\.barrier\.checks='sometimes' is not one of auto, always"),
        ("guard.ops.barrier={chekcs: never}", r"guard\.ops\.barrier\.chekcs is unknown: did you mean 'checks'"),
        ("guard.ops.barrier={every: 0}", r"guard\.ops\.barrier\.every=0 must be a number of at least 1"),
        ("guard.ops.barrier={hysteresis: -1}", r"guard\.ops\.barrier\.hysteresis=-1 must be a number of at least 0"),
        ("guard.groups.dpp=never", r"guard\.groups\.dpp: there is no group 'dpp'"),
        ("guard.groups.dp={ops: 3}", r"guard\.groups\.dp\.ops=3 must be a mapping"),
        ("guard.threshold=3", r"guard\.threshold='3' is not an amount of memory"),
        ("guard.budget=0.5", r"guard\.budget=0\.5 must lie in"),
        ("guard.action=panic", r"guard\.action='panic' is not one of none, trim, clear, raise"),
        (("guard=off", "guard.release=true"), r"guard\.release=true needs the wrapper"),
        ("guard=slim", r"guard=slim is unknown: did you mean 'slime'"),
    ],
)
def test_bad_keys_are_refused(override: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([*QUICKSTART, *([override] if isinstance(override, str) else override)], files=False)


@pytest.mark.parametrize(
    ("argv", "device", "world", "expected", "reason"),
    [
        ((), "cpu", 2, False, "placement.device is cpu"),
        ((), "cuda", 2, False, "not yet measured with NCCL"),
        ((), "cuda", 1, False, "one trainer rank"),
        (("placement.mode=split",), "cuda", 2, False, "no engine runs on the trainer's GPUs"),
        (("guard.release=true",), "cpu", 1, True, ""),
        (("guard.release=false",), "cuda", 2, False, ""),
        (("guard=off",), "cuda", 2, False, ""),
    ],
)
def test_communicators_are_released_as_configured(
    argv: tuple[str, ...], device: str, world: int, expected: bool, reason: str
) -> None:
    notes: list[tuple[str, object, str]] = []
    cfg = load_config([*QUICKSTART, *argv], files=False)
    assert releases(cfg, device, world, lambda *note: notes.append(note)) is expected
    assert [(key, value) for key, value, _ in notes] == ([("guard.release", str(expected).lower())] if reason else [])
    assert all(note_reason.startswith(reason) for _, _, note_reason in notes)
    lines = "\n".join(guard_lines(guard_spec(cfg, "trainer", release=expected)))
    assert ("destroyed during rollouts" in lines) is expected


@pytest.mark.parametrize(
    ("argv", "device", "memory", "is_noted"),
    [
        (("guard.memory=driver",), "cpu", "host", True),
        (("guard.memory=allocator",), "cpu", "host", True),
        (("guard.memory=driver", "guard=off"), "cpu", "host", False),
        (("guard.memory=driver",), "cuda", "driver", False),
        (("guard.memory=host",), "cpu", "host", False),
        ((), "cpu", "auto", False),
    ],
)
def test_a_cpu_has_only_the_hosts_memory_and_the_plan_says_so(
    argv: tuple[str, ...], device: str, memory: str, is_noted: bool
) -> None:
    notes: list[tuple[str, object, str]] = []
    cfg = load_config([*QUICKSTART, *argv], files=False)
    assert memory_source(cfg, device, lambda *note: notes.append(note)) == memory
    reason = "placement.device is cpu: {} would read the memory of a GPU"
    assert notes == ([("guard.memory", "host", reason.format(cfg.guard.memory))] if is_noted else [])


def test_the_plan_lists_a_replaced_guard_memory() -> None:
    cfg = load_config([*QUICKSTART, "guard.memory=driver", "placement.device=cpu"], files=False)
    plan = make_plan(cfg, Machine(0, 8, 64 * GIB, (), is_local=False))
    assert plan.actor.guard.memory == "host"
    assert [item.value for item in plan.decisions if item.key == "guard.memory"] == ["host"]


def test_the_plan_shows_every_op_under_its_policy() -> None:
    text = "\n".join(guard_lines(spec_of("guard=slime", "guard.groups.tp={checks: below, action: raise}")))
    head, never = text.split("\n  never\n")
    assert "always: clear below 3 GiB" in head
    assert "all_reduce," in head
    assert "broadcast_object_list" in never
    assert "below: raise below 3 GiB\n    tp: every op" in never
    assert all(op.name in text for op in OPS)
    assert "used directly" in "\n".join(guard_lines(spec_of("guard=off")))


def test_guard_is_a_group_of_the_tree() -> None:
    assert isinstance(load_config(QUICKSTART, files=False).guard, Config)
