"""Rank functions of test_forensics: worlds of three ranks in which one rank is at fault."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import io
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.distributed.forensics.ring import FAILED, read_rings
from slime_like.distributed.wrapper import install
from slime_like.distributed.wrapper.watchdog import Watchdog
from slime_like.distributed.wrapper.wrapper import Wrapper
from slime_like.errors import CollectiveError
from slime_like.util.deadline import Deadline, scale
from tests.train.ranks import RankWorld, fork_ranks

SECONDS = 3.0
# Time beyond the deadline until the rank at fault is named: errors.ARRIVAL_WAIT_S, in which late peers may still arrive,
# and as much again for the backend to notice and the rings to be read on a busy machine.
GRACE_S = 4.0


def spec(folder: Path, seconds: float = SECONDS) -> GuardSpec:
    return GuardSpec(
        wrap=True, default=MemoryPolicy(checks="never"), deadline_s=seconds, folder=str(folder), name="trainer"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Outcomes:
    """Results of ``cases``, and for each mismatch the error of its ranks and the ``perf_counter_ns`` after it."""

    cases: list[dict[str, tuple[str, float]]]
    mismatches: dict[str, tuple[str, int]]


def on_forks(world: RankWorld, folder: Path, mismatches: dict[str, Path]) -> Outcomes:
    """Run ``cases``, and ``mismatch`` of each kind with rings in its folder, each on three forks of this process."""
    results = fork_ranks(cases, 3, folder)
    errors: dict[str, tuple[str, int]] = {}
    for kind, rings in mismatches.items():
        try:
            fork_ranks(mismatch, 3, rings, kind)
        except AssertionError as error:
            errors[kind] = (str(error), time.perf_counter_ns())
    return Outcomes(results, errors)


def cases(world: RankWorld, folder: Path) -> dict[str, tuple[str, float]]:
    """Return {case: (error message of this rank's collective, seconds)}; the message is empty without an error."""
    store = dist.TCPStore(world.host, world.port, world.size, is_master=world.rank == 0)
    out: dict[str, tuple[str, float]] = {}
    faults = {"stopped": _stop_rank, "skips": _skips, "no send": _no_send, "misses rebuild": _misses_rebuild}
    for name, fault in faults.items():
        rings = folder / name
        guard = dataclasses.replace(spec(rings), release=fault is _misses_rebuild)
        install.install(guard, torch.device("cpu"), world.rank)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, store),
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(seconds=SECONDS * scale()),
        )
        for _ in range(3):
            dist.all_reduce(torch.zeros(4))
        start = time.monotonic()
        try:
            with install.phase("step"):
                fault(world.rank, rings)
            message = ""
        except CollectiveError as error:
            message = str(error)
        out[name] = (message, time.monotonic() - start)
        store.set(f"{name}{world.rank}", "ended")
        store.wait([f"{name}{rank}" for rank in range(world.size)])
        dist.destroy_process_group()
        install.remove()
    out["unnoticed"] = (_unnoticed(world, store, folder / "unnoticed"), 0.0)
    return out


def _stop_rank(rank: int, folder: Path) -> None:
    """Stop rank 1; rank 0 wakes it after the collectives of ranks 0 and 2 failed."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.zeros(8))
    finally:
        if rank == 0:
            # Woken earlier, rank 1 would send to rank 2, which would then wait for its next message with a new deadline.
            deadline = Deadline("test", "the failure of rank 2's collective", 4 * SECONDS)
            while (ring := read_rings(folder).get("trainer_rank2")) and ring.records[-1].ended_ns != FAILED:
                time.sleep(min(0.01, deadline.remaining("rank 2")))
            os.kill(read_rings(folder)["trainer_rank1"].pid, signal.SIGCONT)


def _skips(rank: int, folder: Path) -> None:
    """Let rank 1 skip a collective and continue."""
    if rank != 1:
        dist.all_reduce(torch.zeros(16))


def _no_send(rank: int, folder: Path) -> None:
    """Let rank 0 wait for a message that rank 1 does not send."""
    if rank == 0:
        dist.recv(torch.zeros(4), src=1)


def _misses_rebuild(rank: int, folder: Path) -> None:
    """Release communicators; rank 1 does not take part in rebuilding them."""
    install.release()
    if rank != 1:
        with install.phase("push"):
            dist.all_reduce(torch.zeros(16))


# ---- errors for which gloo aborts the process ------------------------------------------------------------------------
def mismatch(world: RankWorld, folder: Path, kind: str) -> None:
    """Let rank 1 pass another size or call another op. gloo aborts the process that notices; the rings stay."""
    store = dist.TCPStore(world.host, world.port, world.size, is_master=world.rank == 0)  # waits for late ranks
    install.install(spec(folder), torch.device("cpu"), world.rank)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=SECONDS * scale()),
    )
    dist.all_reduce(torch.zeros(4))
    if world.rank == 1:
        _await_second(folder, 0, 2)  # the process that notices aborts; the other ranks must have arrived by then
    if world.rank == 1 and kind == "op":
        dist.broadcast(torch.zeros(32), src=0)
    else:
        dist.all_reduce(torch.zeros(64 if world.rank == 1 and kind == "size" else 32))
    c10d._get_default_store().wait(["never"])  # a rank without an error must not exit and remove its ring


def _await_second(folder: Path, *ranks: int) -> None:
    """Wait until these ranks have issued their second op."""
    num_issued = 0
    while num_issued < len(ranks):
        time.sleep(0.01)
        readings = read_rings(folder)
        num_issued = sum(any(r.sequence == 2 for r in readings[f"trainer_rank{rank}"].records) for rank in ranks)


# ---- hangs that the process group does not notice --------------------------------------------------------------------
def _unnoticed(world: RankWorld, store: dist.Store, folder: Path) -> str:
    """Hang in a process group with a long timeout; return the report of the watchdog that would end rank 0."""
    stderr = io.StringIO()
    wrapper = install.install(spec(folder, 3600.0), torch.device("cpu"), world.rank)
    assert wrapper is not None
    dist.init_process_group("gloo", store=dist.PrefixStore("unnoticed", store), rank=world.rank, world_size=world.size)
    dist.all_reduce(torch.zeros(4))
    if world.rank == 0:
        with contextlib.redirect_stderr(stderr):
            end_event = watchdog_event(wrapper)
            work = dist.all_reduce(torch.zeros(4), async_op=True)
            assert end_event.wait(60 * scale())
        store.set("reported", "")
        assert work is not None
        work.wait()
    else:
        store.wait(["reported"])
        dist.all_reduce(torch.zeros(4))
    dist.destroy_process_group()
    install.remove()
    return stderr.getvalue()


def watchdog_event(wrapper: Wrapper) -> threading.Event:
    """Return an event that is set when a watchdog with a deadline of 0.1 s would end the process."""
    end_event = threading.Event()
    Watchdog(wrapper, 0.1, end_event.set)
    return end_event


def killed(world: RankWorld, folder: Path) -> None:
    """Kill this rank; its ring stays."""
    install.install(spec(folder), torch.device("cpu"), world.rank)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(4))
    os.kill(os.getpid(), signal.SIGKILL)
