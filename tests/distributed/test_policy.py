"""Before which ops memory is asked for and what follows, for every policy and any course of memory."""

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

from slime_like.cluster.plan.guard import guard_lines, guard_spec, releases
from slime_like.config.load.loader import load_config
from slime_like.config.schema.base import Config
from slime_like.config.schema.collectives import OPS, SLIME_SKIPS, canonical
from slime_like.config.schema.guard_policy import ACTIONS, CHECKS, GuardSpec, MemoryPolicy, Threshold
from slime_like.distributed.forensics.ring import GroupInfo
from slime_like.distributed.guard import memory_guard as guard_module
from slime_like.distributed.guard.counters import Counter, Group, counter_type
from slime_like.distributed.guard.memory_guard import NEVER, Guard, Requests
from slime_like.distributed.guard.pace import OVERDRAFT
from slime_like.errors import ConfigError, MemoryShortage

GIB = 2**30
QUICKSTART = ["+recipe=quickstart"]


@dataclass
class Simulated:
    """Memory whose course a test decides; each question takes ``cost`` ns of a clock that the test holds as well."""

    name: str = "simulated"
    total: int = 16 * GIB
    left: int = 8 * GIB
    cost: int = 0
    now: int = 0
    gives: int = 0  # bytes that a trim or clear finds
    asked: int = 0
    done: list[str] = field(default_factory=list[str])

    def clock(self) -> int:
        return self.now

    def free(self) -> int:
        self.asked += 1
        self.now += self.cost - self.cost // 2
        return self.left

    def held(self) -> int:
        self.now += self.cost // 2
        return self.total - self.left

    def trim(self) -> None:
        self.done.append("trim")
        self.left += self.gives

    def clear(self) -> None:
        self.done.append("clear")
        self.left += self.gives


@contextlib.contextmanager
def lived(memory: Simulated) -> Generator[None]:
    """The guard lives by the clock of this memory."""
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
    return counter_type()(canonical("test", op), Group(GroupInfo(0, "1", "tp", (0, 1))), policy, 0)


def call(guard: Guard, one: Counter, now: int = 1) -> None:
    """Run the wrapper's check before an op."""
    one.calls += 1
    if now >= one.due:
        guard.check(one, now)


# ---- policies x memory -----------------------------------------------------------------------------------------------
@given(
    checks=st.sampled_from(CHECKS),
    action=st.sampled_from(ACTIONS),
    every=st.integers(1, 5),
    limits=st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    course=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    op=st.sampled_from([op.name for op in OPS]),
)
def test_asks_and_acts_as_the_policy_says(
    checks: str, action: str, every: int, limits: tuple[int, float], course: list[int], op: str
) -> None:
    """Memory stays at each level for one op; under ``auto`` for as long as its budget needs to ask at least once."""
    threshold, hysteresis = limits
    policy = MemoryPolicy(checks, every, Threshold(threshold * GIB, None), hysteresis, action)
    memory, one = Simulated(total=32 * GIB, cost=1_000), counter(policy, op)
    guard = Guard(memory)
    guard.adopt(one)
    resting, shortages, questions = False, 0, 0
    with lived(memory):
        for index, gib in enumerate(course):
            memory.left = gib * GIB
            asks = checks in ("always", "below", "auto") or (checks == "every_n" and index % every == 0)
            acts = asks and gib < threshold and not (checks in ("below", "auto") and resting)
            questions, shortages = questions + asks, shortages + acts
            raised = 0
            for _ in range(60 if checks == "auto" else 1):
                memory.now += 400_000
                try:
                    call(guard, one, memory.now)
                except MemoryShortage as shortage:
                    raised += 1
                    assert re.match(rf"{gib:.2f} GiB .*{op} in group tp.*threshold {threshold} GiB", str(shortage))
            assert raised == (acts and action == "raise")
            if asks:
                resting = acts or (resting and gib < threshold * (1 + hysteresis))
            assert one.shortages == shortages
            assert one.checks == questions or (checks == "auto" and one.checks > questions)
    assert memory.done == ([action] * shortages if action in ("trim", "clear") else [])
    assert one.clears == len(memory.done)
    assert (one.due == NEVER) == (checks == "never")


def test_what_was_freed_is_counted() -> None:
    memory, one = Simulated(left=2 * GIB, gives=GIB), counter(MemoryPolicy(checks="always", action="clear"))
    guard = Guard(memory)
    guard.adopt(one)
    call(guard, one)
    call(guard, one)
    assert (one.clears, one.freed, guard.lowest) == (1, GIB, 2 * GIB)


def test_a_fraction_is_of_all_memory() -> None:
    assert Threshold.parse("k", 0.25).of(16 * GIB) == 4 * GIB
    assert Threshold.parse("k", "1.5GiB").of(7) == 3 * GIB // 2
    assert Threshold.parse("k", "3 GB").of(7) == 3 * 10**9
    for bad in ("3", "-1GiB", "GiB", "3GiX", "1.0", None):
        with pytest.raises(ConfigError, match="give bytes such as 3GiB"):
            Threshold.parse("guard.threshold", bad)


# ---- auto ------------------------------------------------------------------------------------------------------------
def test_a_question_that_costs_more_is_asked_less_often(clocked: Callable[[Simulated], Simulated]) -> None:
    asked: dict[int, int] = {}
    for cost in (10_000, 8_000_000):
        memory = clocked(Simulated(cost=cost))
        one, guard = counter(MemoryPolicy(checks="auto")), Guard(memory)
        guard.adopt(one)
        while memory.now < 100 * 10**9:
            call(guard, one, memory.now)
            memory.now += 1_000_000
        asked[cost] = one.checks
        assert one.check_ns <= 0.001 * memory.now + OVERDRAFT * cost
    assert 5_000 < asked[10_000] <= 10_100
    assert 8 <= asked[8_000_000] <= 14


def test_all_counters_share_the_budget_of_auto(clocked: Callable[[Simulated], Simulated]) -> None:
    memory = clocked(Simulated(cost=1_000_000))
    ones = [counter(MemoryPolicy(checks="auto"), op) for op in ("all_reduce", "broadcast", "barrier")]
    guard = Guard(memory)
    for one in ones:
        guard.adopt(one)
    for _, one in zip(range(30_000), itertools.cycle(ones), strict=False):
        call(guard, one, memory.now)
        memory.now += 1_000_000
    assert sum(one.check_ns for one in ones) <= 0.001 * memory.now + 2 * memory.cost
    assert sum(one.checks for one in ones) >= 25


def test_auto_acts_once_per_shortage(clocked: Callable[[Simulated], Simulated]) -> None:
    memory = clocked(Simulated(left=2 * GIB, cost=1_000))
    one, guard = counter(MemoryPolicy(checks="auto")), Guard(memory)
    guard.adopt(one)
    for left in (2, 2, 3.2, 2, 5, 2):
        memory.left = int(left * GIB)
        for _ in range(3_000):
            call(guard, one, memory.now)
            memory.now += 1_000
    assert memory.done == ["clear", "clear"]  # at first, and after memory had recovered to 5 GiB


# ---- group decisions -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("action", ["trim", "clear", "raise"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_shortage_on_one_rank(action: str, symmetric: bool, tmp_path: Path) -> None:
    policy = MemoryPolicy(checks="always", action=action)
    ranks: list[tuple[Simulated, Guard, Counter]] = []
    for left in (8, 2, 8):
        memory = Simulated(left=left * GIB, gives=4 * GIB)
        guard = Guard(memory, Requests(tmp_path / "requests") if symmetric else None)
        one = counter(policy)
        guard.adopt(one)
        ranks.append((memory, guard, one))
    outcomes: list[list[str]] = []
    for _ in range(3):
        outcomes.append([])
        for memory, guard, one in ranks:
            before = len(memory.done)
            try:
                call(guard, one)
                outcomes[-1] += memory.done[before:] or ["nothing"]
            except MemoryShortage:
                memory.left = 8 * GIB
                outcomes[-1].append("raise")
    alone = [["nothing", action, "nothing"], ["nothing"] * 3, ["nothing"] * 3]
    together = [["nothing", action, action], [action, "nothing", "nothing"], ["nothing"] * 3]
    assert outcomes == (together if symmetric else alone)


def test_never_still_follows_a_group_decision(tmp_path: Path) -> None:
    guards = [Guard(Simulated(), Requests(tmp_path / "requests")) for _ in range(2)]
    ones = [counter(MemoryPolicy(checks="never")) for _ in guards]
    for guard, one in zip(guards, ones, strict=True):
        guard.adopt(one)
    requests = guards[0].requests
    assert requests is not None
    requests.ask("trim")
    for _ in range(2):
        for guard, one in zip(guards, ones, strict=True):
            call(guard, one)
    assert [one.clears for one in ones] == [0, 1]


# ---- config ----------------------------------------------------------------------------------------------------------
def spec_of(*argv: str) -> GuardSpec:
    return guard_spec(load_config([*QUICKSTART, *argv], files=False), "trainer")


def test_presets() -> None:
    slime = spec_of("guard=slime")
    never = {op.name for op in OPS if slime.policy(op.name, "tp").checks == "never"}
    assert never == {canonical("k", name).name for name in SLIME_SKIPS}
    assert len(never) == 8
    other = slime.policy("all_reduce", "tp")
    assert (other.checks, other.threshold.of(0), other.action) == ("always", 3 * GIB, "clear")
    always, auto = spec_of("guard=always"), spec_of()
    assert {always.policy(op.name, "dp").checks for op in OPS} == {"always"}
    assert {auto.policy(op.name, "dp").checks for op in OPS} == {"auto"}
    assert not spec_of("guard=off").wrap
    assert auto.wrap


def test_what_is_more_special_goes_first() -> None:
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
        ("guard.ops.barrier={every: 0}", r"guard\.ops\.barrier\.every=0 must be a number above 0"),
        ("guard.groups.dpp=never", r"guard\.groups\.dpp: there is no group 'dpp'"),
        ("guard.groups.dp={ops: 3}", r"guard\.groups\.dp\.ops=3 must be a mapping"),
        ("guard.threshold=3", r"guard\.threshold='3' is no amount of memory"),
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
def test_communicators_go_where_that_is_asked_for(
    argv: tuple[str, ...], device: str, world: int, expected: bool, reason: str
) -> None:
    notes: list[tuple[str, object, str]] = []
    cfg = load_config([*QUICKSTART, *argv], files=False)
    assert releases(cfg, device, world, lambda *note: notes.append(note)) is expected
    assert [(key, value) for key, value, _ in notes] == ([("guard.release", str(expected).lower())] if reason else [])
    assert all(why.startswith(reason) for _, _, why in notes)
    lines = "\n".join(guard_lines(guard_spec(cfg, "trainer", release=expected)))
    assert ("destroyed while rollouts run" in lines) is expected


def test_the_plan_shows_every_op_under_its_policy() -> None:
    text = "\n".join(guard_lines(spec_of("guard=slime", "guard.groups.tp={checks: below, action: raise}")))
    head, never = text.split("\n  never\n")
    assert "always: clear below 3 GiB" in head
    assert "all_reduce," in head
    assert "broadcast_object_list" in never
    assert "below: raise below 3 GiB\n    tp: every op" in never
    assert all(op.name in text for op in OPS)
    assert "torch's own" in "\n".join(guard_lines(spec_of("guard=off")))


def test_guard_is_a_group_of_the_tree() -> None:
    assert isinstance(load_config(QUICKSTART, files=False).guard, Config)
