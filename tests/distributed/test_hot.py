"""Hot path in C and in Python: both count, record and return the same for every call."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.distributed.forensics.ring import FAILED, HEAD, RECORD, Ring
from slime_like.distributed.guard.symmetric_actions import SymmetricActions
from slime_like.distributed.wrapper import hot, install
from slime_like.distributed.wrapper.wrapper import Wrapper
from tests.distributed.wrapped import Memory
from tests.hypothesis_examples import num_examples

CPU = torch.device("cpu")
NEVER = GuardSpec(wrap=True, default=MemoryPolicy(checks="never"), ring=64)
needs_c = pytest.mark.skipif(hot.load() is None, reason="no C compiler, or no headers of this Python")
gather, scatter = (getattr(dist, name) for name in ("all_gather_into_tensor", "reduce_scatter_tensor"))


@pytest.fixture(scope="module", autouse=True)
def world() -> Generator[None]:
    """Initialise torch's fake backend, with works that wait like those of gloo and NCCL."""
    original: Any = vars(FakeWork)["wait"]
    del FakeWork.wait
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    FakeWork.wait = original


def small() -> torch.Tensor:
    return torch.zeros(8)


def wait_for(work: Any) -> None:
    """Wait for a work, as a caller does."""
    work.wait()


def coalesced() -> None:
    with c10d._coalescing_manager():
        dist.all_reduce(small())
        dist.all_reduce(small())


def group() -> Any:
    return dist.group.WORLD


def in_phase() -> None:
    with install.phase("step"):
        dist.all_reduce(small())


# Every way of calling an op that a backend without communication accepts: plain calls, odd arguments and errors.
CALLS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(small()),
    "later": lambda: wait_for(dist.all_reduce(small(), async_op=True)),
    "dropped": lambda: dist.all_reduce(small(), async_op=True) and None,
    "broadcast": lambda: dist.broadcast(small(), 0),
    "a parameter": lambda: dist.broadcast(torch.nn.Parameter(small(), requires_grad=False), 0),
    "gather": lambda: gather(torch.zeros(16), small()),
    "scatter": lambda: scatter(small(), torch.zeros(16)),
    "all_gather": lambda: dist.all_gather([small(), small()], small()),
    "all_to_all": lambda: dist.all_to_all_single(small(), small()),
    "barrier": lambda: dist.barrier(),
    "own method": lambda: group().allreduce([small()]).wait(),
    "named": lambda: group().barrier(opts=c10d.BarrierOptions()),
    "isend": lambda: wait_for(dist.isend(small(), 1)),
    "irecv": lambda: wait_for(dist.irecv(small(), 1)),
    "no wait": lambda: dist.isend(small(), 1) and None,
    "anyone": lambda: wait_for(group().recv_anysource([small()], 0)),
    "send": lambda: dist.send(small(), 1),
    "recv of a named group": lambda: dist.recv(small(), 1, group=group()),
    "batch": lambda: [wait_for(work) for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, small(), 1)])],
    "no batch": lambda: dist.batch_isend_irecv([]),
    "objects": lambda: dist.broadcast_object_list([1], src=0),
    "coalesced": coalesced,
    "phase": in_phase,
    "twice": lambda: [wait_for(work) for work in [dist.isend(small(), 1)] * 2],
    "no tensor": lambda: group().allreduce("nothing"),
    "nothing": lambda: group().allreduce(),
    "no such word": lambda: group().allreduce([small()], nonsense=1),
    "no peer": lambda: group().send([small()], "nobody", 0),
    "no list": lambda: dist.broadcast_object_list(3, src=0),  # pyright: ignore[reportArgumentType]
    "no wait for nothing": lambda: c10d.Work.wait(3),  # pyright: ignore[reportArgumentType]
}


def outcome(call: Callable[[], object]) -> str:
    """Return the result of a call, or its error."""
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 (both ways must raise the same error)
        return f"{type(error).__name__}: {str(error).splitlines()[0]}; of {type(error.__cause__).__name__}"
    return type(value).__name__


@contextlib.contextmanager
def wrapped(*, in_c: bool, spec: GuardSpec = NEVER) -> Generator[Wrapper]:
    """Wrap collectives in C or in Python."""
    wrapper = install.install(spec, CPU, 0, in_c=in_c)
    assert wrapper is not None
    assert (wrapper.native_ring is not None) == in_c
    try:
        yield wrapper
    finally:
        install.remove()


def run_calls(names: list[str], *, in_c: bool) -> tuple[Any, ...]:
    """Return results, counts and records; times only as their presence and order."""
    with wrapped(in_c=in_c) as w:
        outcomes = [outcome(CALLS[name]) for name in names]
        w.record_completed()
        counts = [(c.op.name, c.calls, c.bytes, c.ns > 0, c.code, dict.fromkeys(c.peers)) for c in w.counters()]
        records: list[Any] = []
        for slot in range(w.ring.slots):
            index, start, end, *fields = RECORD.unpack_from(w.ring.memory, HEAD + slot * RECORD.size)
            state = {0: "in flight", FAILED: "failed"}.get(end, "ended")
            assert state != "ended" or start <= end or not start
            records.append((index, start > 0, state, *fields))
        return outcomes, counts, records, len(w.pending_works), w.composite_thread


@needs_c
@settings(deadline=None, max_examples=num_examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(CALLS)), min_size=1, max_size=30))
def test_c_and_python_give_the_same_results(names: list[str]) -> None:
    assert run_calls(names, in_c=True) == run_calls(names, in_c=False)


@needs_c
def test_c_and_python_agree_on_repeated_calls() -> None:
    names = [*CALLS, *reversed(CALLS), *CALLS]
    assert run_calls(names, in_c=True) == run_calls(names, in_c=False)


@needs_c
@pytest.mark.parametrize("name", ["all_reduce", "later", "gather", "scatter", "barrier", "isend", "send", "batch"])
def test_a_plain_call_runs_no_python_of_the_wrapper(name: str) -> None:
    functions: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and "slime_like/distributed" in frame.f_code.co_filename:
            functions.append(frame.f_code.co_qualname)

    with wrapped(in_c=True):
        CALLS[name]()
        sys.setprofile(note)
        try:
            CALLS[name]()
        finally:
            sys.setprofile(None)
    assert functions == []


@pytest.mark.slow
@needs_c
def test_repeated_calls_leak_no_reference() -> None:
    """Reference counts of arguments and counters are equal after a few and after many calls."""
    tensor, world = small(), group()
    with wrapped(in_c=True) as w:

        def some() -> list[int]:
            for name in CALLS:
                outcome(CALLS[name])
                dist.all_reduce(tensor)
                wait_for(dist.isend(tensor, 1))
                dist.send(tensor, 1)
            gc.collect()
            w.record_completed()
            objects = [tensor, world, *w.counters()]
            return [len(w.pending_works), *map(sys.getrefcount, objects)]

        some()
        counts_before = some()
        assert [some() for _ in range(5)] == [counts_before] * 5

        def many() -> int:
            for _ in range(500):
                for name in ("all_reduce", "later", "dropped", "isend", "send", "batch"):
                    CALLS[name]()
            return sys.getallocatedblocks()

        many()
        assert -many() + many() < 100  # fewer than one block per call


@needs_c
def test_due_calls_reach_the_guard() -> None:
    spec = GuardSpec(wrap=True, default=MemoryPolicy(checks="every_n", every=3), ring=64)
    checks: list[int] = []
    for in_c in (True, False):
        with wrapped(in_c=in_c, spec=spec) as w:
            for _ in range(7):
                dist.all_reduce(small())
            (counter,) = w.counters()
            checks.append(counter.checks)
    assert checks == [3, 3]


@needs_c
@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("checks", ["never", "auto", "every_n"])
def test_a_group_decision_reaches_a_plain_op(checks: str, in_c: bool, tmp_path: Path) -> None:
    policy, memory = MemoryPolicy(checks=checks, every=100), Memory()
    spec = GuardSpec(wrap=True, default=policy, ring=64, symmetric=True, folder=str(tmp_path), name="trainer")
    wrapper = install.install(spec, CPU, 0, memory, in_c=in_c)
    assert wrapper is not None
    try:
        for memory.op_index in range(6):
            if memory.op_index == 3:
                SymmetricActions(tmp_path / "trainer.requests").publish("trim")
            dist.all_reduce(small())
        (counter,) = wrapper.counters()
    finally:
        install.remove()
    assert memory.actions == [("trim", 3)]
    assert (counter.calls, counter.clears) == (6, 1)
    assert (counter.check_at == 0) == (checks == "every_n" or not in_c)  # otherwise later ops are plain again


@needs_c
def test_a_function_bound_while_wrapped_works_after_removal() -> None:
    with wrapped(in_c=True):
        bound = dist.batch_isend_irecv
        bound([dist.P2POp(dist.isend, small(), 1)])
    assert bound is not dist.batch_isend_irecv
    assert bound.__name__ == "batch_isend_irecv"
    assert len(bound([dist.P2POp(dist.isend, small(), 1)])) == 1


@needs_c
def test_a_too_small_ring_buffer_is_refused() -> None:
    module = hot.load()
    with pytest.raises(ValueError, match="does not hold so many records"):
        module.Ring(bytearray(HEAD + 8 * RECORD.size - 1), HEAD, 8)
    with pytest.raises(ValueError, match="does not hold so many records"):
        module.Ring(bytearray(HEAD + 8 * RECORD.size), HEAD, 6)
    with pytest.raises(ValueError, match="does not hold so many records"):
        module.Ring(bytearray(HEAD + 8 * RECORD.size), HEAD, 2**61)  # records, a multiple of 2**64 bytes
    with pytest.raises(ValueError, match="does not hold so many records"):
        module.Ring(bytearray(HEAD + 8 * RECORD.size), HEAD + 16 * RECORD.size, 1)
    with pytest.raises(ValueError, match="smaller than a word"):
        module.Ring(bytearray(HEAD + 8 * RECORD.size), HEAD, 8).watch(bytearray(7))
    with pytest.raises(TypeError):
        module.Call()()
    ring, memory = Ring(None, "a_rank0", 8), module.Ring(bytearray(HEAD + 8 * RECORD.size), HEAD, 8)
    assert [memory.next_record() for _ in range(20)] == [ring.next_record() for _ in range(20)]


def test_without_a_compiler_the_python_path_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    hot.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING), wrapped(in_c=False):
            install.remove()
            wrapper = install.install(NEVER, CPU, 0)
            assert wrapper is not None
            assert wrapper.native_ring is None
            dist.all_reduce(small())
            assert [c.calls for c in wrapper.counters()] == [1]
    finally:
        hot.load.cache_clear()
    assert "counted in Python" in caplog.text
    assert "no C compiler (cc, gcc, clang) on PATH" in caplog.text
