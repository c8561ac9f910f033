"""Rank functions of test_wrapper: training with and without the wrapper, and its counters against torch's trace."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections import Counter as Tally
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile  # the one of torch.profiler imports torch._inductor
from torch.distributed import all_reduce as bound_before_install
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import OPS, Kind
from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy, Threshold
from slime_like.config.schema.resolved import Layout
from slime_like.distributed.wrapper import install
from slime_like.errors import MemoryShortage
from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports
from tests.train.jobs import make_actor, reuse_groups, save_checkpoint
from tests.train.lifecycle import batch, digest, few_micro_batches, train
from tests.train.ranks import RankWorld

# Deprecated names that megatron-core calls.
gather_tensor, gather_base, scatter_tensor = (
    getattr(dist, name) for name in ("all_gather_into_tensor", "_all_gather_base", "reduce_scatter_tensor")
)
# op: (its name in torch's process group hooks, which distinguish fewer ops; its operator, unique to the op)
TRACED = {
    "all_reduce": ("ALLREDUCE", "allreduce_"),
    "all_reduce_coalesced": ("ALLREDUCE", "allreduce_coalesced_"),
    "broadcast": ("BROADCAST", "broadcast_"),
    "reduce": ("REDUCE", "reduce_"),
    "all_gather": ("ALLGATHER", "allgather_"),
    "all_gather_coalesced": ("ALLGATHER", "allgather_coalesced_"),
    "all_gather_into_tensor": ("ALLGATHER", "_allgather_base_"),
    "all_gather_into_tensor_coalesced": ("ALLGATHER", "allgather_into_tensor_coalesced_"),
    "reduce_scatter": ("REDUCE_SCATTER", "reduce_scatter_"),
    "reduce_scatter_tensor": ("REDUCE_SCATTER", "_reduce_scatter_base_"),
    "reduce_scatter_tensor_coalesced": ("REDUCE_SCATTER", "reduce_scatter_tensor_coalesced_"),
    "all_to_all": ("ALLTOALL", "alltoall_"),
    "all_to_all_single": ("ALLTOALL", "alltoall_base_"),
    "gather": ("GATHER", "gather_"),
    "gather_into_tensor": ("GATHER", "gather_into_tensor_"),
    "scatter": ("SCATTER", "scatter_"),
    "barrier": ("BARRIER", "barrier"),
    "isend": ("SEND", "send"),
    "irecv": ("RECV", "recv_"),
    "monitored_barrier": ("", "monitored_barrier_"),  # not seen by hooks
}
Counts = dict[tuple[str, str], int]  # (group name, hook's name of the op) -> calls; (OPERATORS, operator) -> calls
OPERATORS = "all groups"


@contextlib.contextmanager
def traced() -> Generator[Counts]:
    """Count calls in the block independently of the wrapper: by torch's hooks of each group and by its profiler."""
    tally: Tally[tuple[str, str]] = Tally()
    out: Counts = {}
    groups = list(c10d._world.pg_map)
    for group in groups:
        name = str(group.group_name)
        group.register_pre_hook(77, lambda args, name=name: tally.update([(name, args.name.name)]))
    try:
        with profile(use_cpu=True) as profiler:
            yield out
    finally:
        for group in groups:
            group.unregister_pre_hook(77)
    assert profiler is not None
    results: Any = profiler.kineto_results
    event_names = (event.name() for event in results.events())
    tally.update((OPERATORS, name.removeprefix("c10d::")) for name in event_names if name.startswith("c10d::"))
    out.update(tally)


def counts_of_wrapper() -> Counts:
    """Return the same counts from the wrapper's counters, without composites, whose ops are counted themselves."""
    wrapper = install.current()
    assert wrapper is not None
    tally: Tally[tuple[str, str]] = Tally()
    for counter in wrapper.counters():
        if counter.op.name in TRACED and counter.calls:
            hook, operator = TRACED[counter.op.name]
            tally[OPERATORS, operator] += counter.calls
            if hook:
                tally[counter.group.info.name, hook] += counter.calls
    return dict(tally)


@dataclass(frozen=True)
class Compared:
    """Comparison of training, save, load, export and scores of a layout with and without the wrapper."""

    same_bits: bool
    traced: Counts
    counted: Counts
    ops: tuple[str, ...]  # ops that the layout used, including composites
    metrics: dict[str, float]


WRAPPED = GuardSpec(wrap=True, default=MemoryPolicy(checks="never"))


def run_all(
    world: RankWorld, models: dict[str, Path], scratch: Path, layouts: dict[str, tuple[Layout, dict[str, Any]]]
) -> tuple[dict[str, Any], dict[str, Compared]]:
    """Run all checks of this file in one process group."""
    return every_op(world, scratch / "requests"), compare(world, models, scratch, layouts)


def compare(
    world: RankWorld, models: dict[str, Path], scratch: Path, layouts: dict[str, tuple[Layout, dict[str, Any]]]
) -> dict[str, Compared]:
    """Run every layout with and without the wrapper."""
    with heavy_imports():  # as on trainer ranks: megatron collects garbage at every save and load
        from slime_like.train.megatron.platform import host

        host.install("cpu")
        importlib.import_module("slime_like.train.megatron.rank.trainer")
    reuse_groups()
    out: dict[str, Compared] = {}
    for name, (layout, settings) in layouts.items():
        spec = {key: value for key, value in settings.items() if key != "family"}
        model = models[settings.get("family", "qwen3")]
        plain = _run(world, model, scratch / f"{name} plain", layout, spec)
        actor = make_actor(world, model, layout, guard=WRAPPED, **spec)
        install.install(WRAPPED, torch.device("cpu"), world.rank)  # counts from here on
        with traced() as trace:
            digests, metrics = _work(actor, scratch / f"{name} wrapped", layout)
            counts = counts_of_wrapper()
        wrapper = install.current()
        assert wrapper is not None
        ops = tuple(sorted({counter.op.name for counter in wrapper.counters() if counter.calls}))
        install.remove()
        out[name] = Compared(digests == plain, trace, counts, ops, metrics)
    return out


def _run(world: RankWorld, model: Path, scratch: Path, layout: Layout, spec: dict[str, Any]) -> list[str]:
    assert install.current() is None
    return _work(make_actor(world, model, layout, **spec), scratch, layout)[0]


def _work(actor: Any, scratch: Path, layout: Layout) -> tuple[list[str], dict[str, float]]:
    """Run two rollouts, a save, a load and an export; return digests of weights and scores, and metrics."""
    make = few_micro_batches(layout)
    metrics = train(actor, layout, 1, make=make)
    digests = [digest(actor)]
    save_checkpoint(actor, scratch, 1)
    train(actor, layout, 2, make=make)
    digests.append(digest(actor))
    actor.load(scratch, 1)
    digests.append(digest(actor))
    score = actor.score(batch(3)[0])
    digests.append("" if score is None else hashlib.sha256(score.tobytes()).hexdigest())
    sha = hashlib.sha256()
    for bucket in actor.hf_export.buckets(1 << 20):
        for tensor_name, tensor in bucket.tensors:
            sha.update(tensor_name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return [*digests, sha.hexdigest()], metrics


# ---- every op, by every function and method that issues it -----------------------------------------------------------
def every_op(world: RankWorld, folder: Path) -> dict[str, Any]:
    """Run each op of the table with and without the wrapper; return results, counts and the state after removal."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{world.host}:{world.port}", rank=world.rank, world_size=world.size
    )
    original = {name: vars(dist.ProcessGroup)[name] for op in OPS for name in op.methods}
    functions = {name: getattr(dist, name) for op in OPS if op.kind is Kind.COMPOSITE for name in op.functions}
    wait, destroy = vars(c10d.Work)["wait"], dist.destroy_process_group
    plain = _every_op(world)
    paths = [_run_wrapped(world, plain, in_c=in_c) for in_c in (True, False)]
    is_restored = (
        all(vars(dist.ProcessGroup)[name] is method for name, method in original.items())
        and all(getattr(dist, n) is f and getattr(c10d, n) is f for n, f in functions.items())
        and vars(c10d.Work)["wait"] is wait
        and dist.destroy_process_group is destroy
    )
    off = install.install(GuardSpec(wrap=False), torch.device("cpu"), world.rank)
    is_untouched = off is None and all(vars(dist.ProcessGroup)[name] is method for name, method in original.items())
    return {
        "paths": paths,
        "restored": is_restored,
        "untouched": is_untouched,
        "shortage": {
            f"{action} {symmetric}": shortage_on_one_rank(
                world, folder / f"{action}{symmetric}", action, symmetric=symmetric
            )
            for action in ("trim", "clear", "raise")
            for symmetric in (False, True)
        },
        "every third": every_third(world),
        "across nodes": across_nodes(world, folder / f"node{world.rank}"),
    }


def _run_wrapped(world: RankWorld, plain: list[Any], *, in_c: bool) -> dict[str, Any]:
    """Run every op wrapped, with the hot path in C or in Python; compare results and return counts."""
    wrapper = install.install(WRAPPED, torch.device("cpu"), world.rank, in_c=in_c)
    assert wrapper is not None
    with traced() as trace:
        records = _every_op(world)
    results: dict[str, Any] = {
        "same": [torch.equal(a, b) for a, b in zip(plain, records, strict=True)],
        "calls": {counter.op.name: counter.calls for counter in wrapper.counters()},
        "bytes": {counter.op.name: counter.bytes for counter in wrapper.counters()},
        "no time": [counter.op.name for counter in wrapper.counters() if counter.ns <= 0],
        "traced": trace,
        "counted": counts_of_wrapper(),
    }
    wrapper.record_completed()
    results["in flight"] = len(wrapper.pending_works)
    install.remove()
    return results


# ---- a shortage of memory on one rank --------------------------------------------------------------------------------
SHORT_RANK, SHORT_AT, ROUNDS = 1, 2, 6


class Memory:
    """Simulated memory with plenty free until ``free_bytes`` is lowered; ``actions`` are (action, index of the op)."""

    name, total = "simulated", 16 * 2**30

    def __init__(self) -> None:
        self.free_bytes, self.op_index = 8 * 2**30, 0
        self.actions: list[tuple[str, int]] = []

    def free(self) -> int:
        """Return the free bytes."""
        return self.free_bytes

    def process_bytes(self) -> int:
        """Return the used bytes."""
        return self.total - self.free_bytes

    def trim(self) -> None:
        """Record the action and free memory."""
        self.actions.append(("trim", self.op_index))
        self.free_bytes = 8 * 2**30

    def clear(self) -> None:
        """Record the action and free memory."""
        self.actions.append(("clear", self.op_index))
        self.free_bytes = 8 * 2**30


def shortage_on_one_rank(world: RankWorld, folder: Path, action: str, *, symmetric: bool) -> dict[str, Any]:
    """Run all-reduces with a shortage of memory on one rank before one of them; return the actions and counts."""
    memory = Memory()
    policy = MemoryPolicy(checks="always", threshold=Threshold(2**30, None), action=action)
    spec = GuardSpec(wrap=True, default=policy, symmetric=symmetric, folder=str(folder), name="trainer")
    dist.barrier()
    assert install.install(spec, torch.device("cpu"), world.rank, memory) is not None
    sums: list[float] = []
    for memory.op_index in range(ROUNDS):
        if world.rank == SHORT_RANK and memory.op_index == SHORT_AT:
            memory.free_bytes = 2**20
        value = torch.tensor(float(memory.op_index + world.rank))
        try:
            dist.all_reduce(value)
        except MemoryShortage as error:
            memory.actions.append((f"raise: {error}", memory.op_index))
            memory.free_bytes = 8 * 2**30
            dist.all_reduce(value)
        sums.append(value.item())
    values = {metric.name: metric.value for metric in install.drain()}
    install.remove()
    return {
        "actions": memory.actions,
        "sums": sums,
        "shortages": values["guard/shortages"],
        "clears": values["guard/clears"],
    }


def across_nodes(world: RankWorld, folder: Path) -> dict[str, Any]:
    """Give each rank its own folder, as on two nodes; run all-reduces until both ranks have acted on one's shortage."""
    memory = Memory()
    policy = MemoryPolicy(checks="always", threshold=Threshold(2**30, None), action="trim")
    spec = GuardSpec(wrap=True, default=policy, symmetric=True, nodes=2, folder=str(folder), name="trainer")
    dist.barrier()
    assert install.install(spec, torch.device("cpu"), world.rank, memory) is not None
    deadline, num_acted = Deadline("test", "a request from another node", 30), 0.0
    while num_acted < world.size:
        if world.rank == SHORT_RANK and not memory.actions:
            memory.free_bytes = 2**20
        value = torch.tensor(float(bool(memory.actions)))
        dist.all_reduce(value)
        num_acted = value.item()
        deadline.remaining("the other rank")
    clears = {metric.name: metric.value for metric in install.drain()}["guard/clears"]
    install.remove()
    return {"actions": [action for action, _ in memory.actions], "clears": clears}


def every_third(world: RankWorld) -> int:
    """Return the number of memory queries in seven calls."""
    spec = GuardSpec(wrap=True, default=MemoryPolicy(checks="every_n", every=3))
    wrapper = install.install(spec, torch.device("cpu"), world.rank, Memory())
    assert wrapper is not None
    for _ in range(7):
        dist.all_reduce(torch.zeros(1))
    (counter,) = wrapper.counters()
    install.remove()
    return counter.checks


def _every_op(world: RankWorld) -> list[Any]:
    rank, size, peer = world.rank, world.size, 1 - world.rank
    source = torch.arange(4, dtype=torch.float32) + 10 * rank
    out: list[Any] = []

    def output(value: torch.Tensor) -> torch.Tensor:
        out.append(value)
        return value

    bound_before_install(output(source.clone()))
    dist.all_reduce(output(source.clone()), async_op=True).wait()  # pyright: ignore[reportOptionalMemberAccess]
    dist.group.WORLD.allreduce([output(source.clone())]).wait()  # pyright: ignore[reportOptionalMemberAccess]
    dist.broadcast(output(source.clone()), src=1)
    dist.reduce(output(source.clone()), dst=0)
    dist.all_gather([output(torch.zeros(4)) for _ in range(size)], source)
    gather_tensor(output(torch.zeros(8)), source)
    gather_base(output(torch.zeros(8)), source)
    dist.group.WORLD._allgather_base(output(torch.zeros(8)), source).wait()  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    dist.reduce_scatter(output(torch.zeros(2)), [source[:2].clone(), source[2:].clone()])
    scatter_tensor(output(torch.zeros(2)), source)
    dist.all_to_all_single(output(torch.zeros(4)), source)
    dist.gather(source, [output(torch.zeros(4)) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.scatter(output(torch.zeros(4)), [source, source + 1] if rank == 0 else None, src=0)
    dist.barrier()
    dist.monitored_barrier()
    with c10d._coalescing_manager(async_ops=True) as works:
        gather_tensor(output(torch.zeros(8)), source)
        gather_tensor(output(torch.zeros(8)), source + 1)
    works.wait()
    with c10d._coalescing_manager():
        dist.all_reduce(output(source.clone()))
        dist.all_reduce(output(source.clone()))
    (dist.send if rank else dist.recv)(output(source.clone()), peer)
    batch_ops = [dist.P2POp(dist.isend, source, peer), dist.P2POp(dist.irecv, output(torch.zeros(4)), peer)]
    for work in dist.batch_isend_irecv(batch_ops):
        work.wait()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    dist.broadcast_object_list(objects, src=0)
    gathered: list[Any] = [None] * size
    dist.gather_object(rank, gathered if rank == 0 else None)
    dist.scatter_object_list([None], [1, 2] if rank == 0 else None)
    return out
