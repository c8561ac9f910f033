"""Jobs for ranks: a test module lists what its ranks must do, and each world size is spawned once for all of them.

A module's ``JOBS`` maps world size -> jobs. The session fixture ``results`` collects the jobs of the modules that are
run; a test then reads ``results[name]``, a list with what each rank returned. A job that failed leaves its traceback.
"""

from __future__ import annotations

import gc
import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.batch import PackedBatch
from slime_like.config.schema.resolved import ActorSpec, Layout
from slime_like.util.imports import heavy_imports
from slime_like.util.ports import RendezvousAddress
from tests.train.models import make_spec
from tests.train.ranks import World, fork_ranks, run_ranks

if TYPE_CHECKING:
    from slime_like.train.megatron.model.forward import MicroBatch
    from slime_like.train.megatron.platform.groups import RankInfo
    from slime_like.train.megatron.rank.trainer import RankTrainer

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


@dataclass(frozen=True, slots=True)
class Job:
    """``target(world, shared, *args)`` on every rank."""

    name: str
    target: str  # module:function
    args: tuple[Any, ...] = ()
    late: bool = False  # after all jobs that are not: it reads what more ranks have saved


@dataclass(frozen=True, slots=True)
class Shared:
    """Inputs shared by all jobs, and a folder for the job's output."""

    models: dict[str, Path]  # tied, untied
    references: dict[str, Any]  # the same names -> parity.Reference
    scratch: Path


@dataclass(frozen=True, slots=True)
class Failed:
    """An error raised by a rank's job."""

    text: str


SECONDS_PER_JOB = 4


def run_pools(world: World, shared: Shared, by_size: dict[int, list[Job]]) -> dict[str, list[Any]]:
    """The jobs of every world size, one size after the other, by forks of this process: name -> what each rank returned."""
    assert world.size == 1
    prepare([job for jobs in by_size.values() for job in jobs])
    out: dict[str, list[Any]] = {}
    rounds = [
        (size, [job for job in jobs if job.late == late])
        for late in (False, True)
        for size, jobs in sorted(by_size.items())  # what one rank saved, two may read
    ]
    for size, jobs in (pool for pool in rounds if pool[1]):
        ranks = fork_ranks(run_jobs, size, shared, jobs, seconds=60 + SECONDS_PER_JOB * len(jobs))
        out |= {job.name: [rank[job.name] for rank in ranks] for job in jobs}
    return out


def run_forked(target: str, size: int, *args: Any, seconds: float = 240) -> list[Any]:
    """Return the results of ``run_ranks`` on forks of one rank that has imported megatron, which each would import again."""
    return run_ranks("tests.train.jobs:fork_target", 1, target, size, args, seconds, seconds=seconds + 60)[0]


def fork_target(world: World, target: str, size: int, args: Sequence[Any], seconds: float) -> list[Any]:
    """Run ``target`` (module:function) on forks of this rank."""
    assert world.size == 1
    module, _, function = target.partition(":")
    import_trainer(module)
    return fork_ranks(getattr(importlib.import_module(module), function), size, *args, seconds=seconds)


def prepare(jobs: Sequence[Job]) -> None:
    """Import the modules of the jobs, and share process groups between them."""
    import_trainer(*sorted({job.target.partition(":")[0] for job in jobs}))
    reuse_groups()


def import_trainer(*modules: str) -> None:
    """Import the trainer, then ``modules``, as its ranks do."""
    with heavy_imports():  # megatron collects garbage at every save and load
        from slime_like.train.megatron.platform import host

        host.install("cpu")
        used = (
            "slime_like.train.megatron.rank",
            "transformers.models.auto",
        )
        for name in (*used, *modules):
            importlib.import_module(name)


def run_jobs(world: World, shared: Shared, jobs: Sequence[Job]) -> dict[str, Any]:
    """Every job in turn, in one process group; a failing one does not hide the others."""
    out: dict[str, Any] = {}
    for job in jobs:
        gc.collect()
        gc.freeze()  # megatron collects garbage at every save and load: of this job's then, not of all that was imported
        module, _, function = job.target.partition(":")
        own = Shared(shared.models, shared.references, shared.scratch / job.name.replace(" ", "_"))
        try:
            out[job.name] = getattr(importlib.import_module(module), function)(world, own, *job.args)
        except Exception:  # noqa: BLE001 (fault boundary: the test shows it)
            out[job.name] = Failed(traceback.format_exc())
    return out


def reuse_groups() -> None:
    """A layout met before gets its process groups again: every new set of gloo groups leaves some 60 threads behind."""
    from megatron.core import parallel_state

    known: dict[str, dict[str, Any]] = {}
    stock = parallel_state.initialize_model_parallel

    def initialize(**sizes: Any) -> None:
        key = repr(sorted(sizes.items()))
        if key not in known:
            stock(**sizes)
            known[key] = {name: value for name, value in vars(parallel_state).items() if name[:1] == "_" != name[1:2]}
        parallel_state.__dict__.update(known[key])

    parallel_state.initialize_model_parallel = initialize


def make_actor(world: World, folder: Path, layout: Layout, **spec: Any) -> RankTrainer:
    """A rank of a small trainer; keyword arguments as for ``make_spec``."""
    return start_trainer(world, make_spec(folder, layout, **spec))


def start_trainer(world: World, spec: ActorSpec, local_rank: int = 0) -> RankTrainer:
    """Join the world and build a rank of the trainer."""
    rank_info = enter(world, spec, local_rank)
    from slime_like.train.megatron.rank.trainer import RankTrainer

    return RankTrainer(spec, rank_info)


def enter(world: World, spec: ActorSpec, local_rank: int = 0) -> RankInfo:
    """Join the world; megatron may be imported afterwards."""
    from slime_like.train.megatron.platform import groups

    master = RendezvousAddress(world.host, world.port)
    return groups.enter(spec, rank=world.rank, world_size=world.size, master=master, local_rank=local_rank)


def annotated(trainer: RankTrainer, rows: Sequence[PackedBatch]) -> list[MicroBatch]:
    """Return the micro-batches of ``rows`` with the scores and advantages that the loss reads."""
    trainer.open_rollout([rows])
    trainer.compute_advantages({})
    return trainer.close().micros


class Results(dict[str, list[Any]]):
    """Job name -> what each rank returned; reading a job that failed fails the test with its traceback."""

    def __getitem__(self, name: str) -> list[Any]:
        found = super().__getitem__(name)
        for rank, result in enumerate(found):
            assert not isinstance(result, Failed), f"job {name!r}, rank {rank}:\n{result.text}"
        return found
