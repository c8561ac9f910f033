"""Rank functions of test_reload: overlapping groups, destroyed and rebuilt often, with torch alone and in megatron."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.config.schema.resolved import Layout
from slime_like.distributed.wrapper import install
from slime_like.errors import CollectiveError
from slime_like.util.imports import heavy_imports
from tests.train.ranks import RankWorld

CYCLES = 20
NUM_STABLE = 3  # consecutive readings without a decrease after which a count is stable
SPEC = GuardSpec(wrap=True, default=MemoryPolicy(checks="never"), release=True)
Resources = tuple[int, int]


def resources() -> Resources:
    """Return the stable numbers of threads and file descriptors: a joined thread may still be listed for a while."""
    gc.collect()
    minimum, num_equal = _count_resources(), 0
    while num_equal < NUM_STABLE:
        time.sleep(0.01)
        threads, files = _count_resources()
        current = min(threads, minimum[0]), min(files, minimum[1])
        num_equal, minimum = (num_equal + 1 if current == minimum else 0), current
    return minimum


def _count_resources() -> Resources:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def run_all(
    world: RankWorld, models: dict[str, Path], scratch: Path, layouts: dict[str, tuple[Layout, str]]
) -> dict[str, Any]:
    """Run all checks of this file on the same ranks."""
    with heavy_imports():  # excludes the imports from garbage collection, which resources() calls often
        from slime_like.train.megatron.platform import host

        host.install("cpu")  # starts no thread; every later thread belongs to a communicator
        importlib.import_module("slime_like.train.megatron.rank.trainer")
    out: dict[str, Any] = {"gloo alone": gloo_alone(world, scratch / "alone")}
    wrapper = install.install(SPEC, torch.device("cpu"), world.rank)
    assert wrapper is not None
    out["before"] = resources()
    dist.init_process_group(
        "gloo", init_method=f"tcp://{world.host}:{world.port}", rank=world.rank, world_size=world.size
    )
    out |= cycles(world)
    releasing = {name: train_releasing(world, models[kind], layout, SPEC) for name, (layout, kind) in layouts.items()}
    out["refused"]["removal"] = _error(install.remove)
    out["refused"]["no release"] = _error(
        lambda: install.install(GuardSpec(wrap=True), torch.device("cpu"), world.rank)
    )
    dist.destroy_process_group()
    install.remove()
    store = dist.FileStore(str(scratch / "store"), world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    plain = {
        name: train_releasing(world, models[kind], layout, GuardSpec()) for name, (layout, kind) in layouts.items()
    }
    imported_modules = sorted(sys.modules.keys() & {"torch._dynamo", "wandb"})
    return {**out, "released training": releasing, "plain training": plain, "imported": imported_modules}


# ---- alone -----------------------------------------------------------------------------------------------------------
def cycles(world: RankWorld) -> dict[str, Any]:
    """Run ops in every group, with all communicators destroyed and rebuilt between rounds."""
    wrapper = install.current()
    assert wrapper is not None
    groups = make_groups()
    identities = [(id(group), group.group_name, dist.get_process_group_ranks(group)) for group in groups]
    out: dict[str, Any] = {"same": 0, "held": [], "released": [], "keys": []}
    expected = ops(world, groups)
    for _ in range(CYCLES):
        install.release()
        out["released"].append(resources())
        with install.phase("step"):
            results = ops(world, groups)
        out["same"] += all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        out["held"].append(resources())
        out["keys"].append(c10d._get_default_store().num_keys() if world.rank == 0 else 0)
    out["unchanged"] = identities == [(id(g), g.group_name, dist.get_process_group_ranks(g)) for g in groups]
    out["calls"] = {c.group.info.name: c.calls for c in wrapper.counters() if c.op.name == "all_reduce"}
    out["generation"] = wrapper.generation
    out["reload seconds"] = wrapper.reload_ns / 1e9
    out["refused"] = refusals(groups)
    with install.phase("end"):
        for group in groups[1:]:
            dist.destroy_process_group(group)
        dist.barrier()
    return out


def refusals(groups: list[Any]) -> dict[str, str]:
    """Return the messages of refused operations."""
    out: dict[str, str] = {}
    work = dist.irecv(torch.zeros(2), (dist.get_rank() - 1) % dist.get_world_size())
    out["in flight"] = _error(install.release)
    send_work = dist.isend(torch.zeros(2), (dist.get_rank() + 1) % dist.get_world_size())
    for pending in (send_work, work):
        assert pending is not None
        pending.wait()
    bypassing = torch.ones(2)
    out["past the wrapper"] = _error(lambda: torch.ops._c10d_functional.all_reduce(bypassing, "sum", "0"))
    install.release()
    out["released"] = _error(lambda: dist.all_reduce(torch.zeros(1)))
    out["released object"] = _error(lambda: dist.all_gather_object([0] * dist.get_world_size(), 1))
    return out


def _error(call: Any) -> str:
    try:
        call()
    except (CollectiveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gloo_alone(world: RankWorld, store: Path) -> list[Resources]:
    """Return threads and descriptors after cycles of creating, using and destroying plain torch groups."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), world.size), rank=world.rank, world_size=world.size
    )
    history: list[Resources] = []
    for _ in range(5):
        groups = make_groups()
        ops(world, groups)
        while len(groups) > 1:
            dist.destroy_process_group(groups.pop())
        history.append(resources())
    dist.barrier()
    dist.destroy_process_group()
    return history


def make_groups() -> list[Any]:
    """Create rows, columns and a chain of ranks; return the world and the groups of this rank, which overlap."""
    lists = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3]]
    groups: list[Any] = [dist.new_group(ranks) for ranks in lists]
    return [dist.group.WORLD, *(group for group, ranks in zip(groups, lists, strict=True) if dist.get_rank() in ranks)]


def ops(world: RankWorld, groups: list[Any]) -> list[torch.Tensor]:
    """Run in each group a sum, a sum by the group's method and coalesced gathers, then a ring of sends."""
    out: list[torch.Tensor] = []
    for group in groups:
        total = torch.arange(5.0) + world.rank
        dist.all_reduce(total, group=group)
        resent = total + world.rank
        group.allreduce([resent]).wait()
        gathered = [torch.zeros(5 * group.size()) for _ in range(2)]
        with c10d._coalescing_manager(group=group, async_ops=True) as works:
            for tensor in gathered:
                getattr(dist, "all_gather_into_tensor")(tensor, resent, group=group)  # noqa: B009 (deprecated to pyright)
        works.wait()
        out += [total, resent, *gathered]
    own_value, received = torch.full((3,), float(world.rank)), torch.zeros(3)
    peers = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own_value, peers[0]), dist.P2POp(dist.irecv, received, peers[1])]
    ):
        work.wait()
    return [*out, received]


# ---- under megatron --------------------------------------------------------------------------------------------------
def train_releasing(world: RankWorld, model: Path, layout: Layout, guard: GuardSpec) -> dict[str, Any]:
    """Return digests of weights and scores over two rollouts with a scoring pass between them.

    Communicators are released after each of the three, if ``guard`` releases communicators.
    """
    from tests.train.jobs import make_actor
    from tests.train.lifecycle import batch, digest, train

    actor = make_actor(world, model, layout, guard=guard)
    digests: list[str] = []
    train(actor, layout, 1)
    install.release()
    score = actor.score(batch(1)[0])
    digests += [digest(actor), "" if score is None else score.tobytes().hex()]
    install.release()
    train(actor, layout, 2)
    digests.append(digest(actor))
    install.release()
    wrapper = install.current()
    if wrapper is None:
        return {"digests": digests, "generations": 0, "groups": 0}
    groups = len(wrapper.released)
    with install.phase("end"):
        return {"digests": digests, "generations": wrapper.generation, "groups": groups}
