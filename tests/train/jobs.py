"""Jobs for ranks: test modules list functions to run on ranks, and one set of ranks per world size runs all jobs.

A module's ``JOBS`` maps world size -> jobs. The session fixture ``results`` collects the jobs of the selected modules.
A test reads ``results[name]``, the list of the ranks' results. The result of a failed job is its traceback.
Late jobs run on a second set of ranks.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.batch import PackedBatch
from slime_like.checkpoint.files import name_latest
from slime_like.config.schema.names import FAMILIES
from slime_like.config.schema.resolved import Layout, RankSpec
from slime_like.util.imports import heavy_imports, without_model_classes
from slime_like.util.ports import RendezvousAddress
from tests.train.models import make_spec
from tests.train.ranks import RankWorld, fork_ranks, run_ranks

if TYPE_CHECKING:
    from slime_like.train.megatron.model.forward import MicroBatch
    from slime_like.train.megatron.platform.groups import RankInfo
    from slime_like.train.megatron.rank.rank_model import RankModel
    from slime_like.train.megatron.rank.trainer import RankTrainer

KINDS = (  # names of transformers' modules for the models of conftest.py
    *("deepseek_v2", "deepseek_v3", "glm4", "glm4_moe", "llama", "minimax_m2"),
    *("qwen2", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
)
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


@dataclass(frozen=True, slots=True)
class RankJob:
    """Call of ``target(world, shared, *args)`` on every rank."""

    name: str
    target: str  # module:function
    args: tuple[Any, ...] = ()
    late: bool = False  # True: run after all other jobs, to read checkpoints of larger world sizes


@dataclass(frozen=True, slots=True)
class Shared:
    """Inputs shared by all jobs, and a folder for the job's output."""

    models: dict[str, Path]  # kind -> HF folder
    references: dict[str, Any]  # kind -> parity.Reference
    scratch: Path


@dataclass(frozen=True, slots=True)
class Failed:
    """Traceback of a job that failed on a rank."""

    text: str


SECONDS_PER_JOB = 4


def run_pools(world: RankWorld, shared: Shared, by_size: dict[int, list[RankJob]]) -> dict[str, list[Any]]:
    """Run the jobs of each world size on forks of this process: one size after another, and the late jobs at the end.

    Return a dict from the name of each job to the results of its ranks.
    """
    assert world.size == 1
    prepare([job for jobs in by_size.values() for job in jobs])
    out: dict[str, list[Any]] = {}
    rounds = [
        (size, [job for job in jobs if job.late == runs_late])
        for runs_late in (False, True)
        for size, jobs in sorted(by_size.items())  # ascending, because jobs of two ranks read checkpoints of one rank
    ]
    for size, jobs in (pool for pool in rounds if pool[1]):
        ranks = fork_ranks(run_jobs, size, shared, jobs, seconds=60 + SECONDS_PER_JOB * len(jobs))
        out |= {job.name: [rank[job.name] for rank in ranks] for job in jobs}
    return out


def run_forked(calls: Mapping[str, Sequence[Any]], seconds: float = 240) -> Results:
    """Run each call like ``run_ranks(*call)``, in turn, on forks of one process that has imported the trainer.

    Return a dict from the name of each call to the results of its ranks. ``seconds``: limit of each call.
    """
    limit = 60 + seconds * len(calls)
    return Results(run_ranks("tests.train.jobs:fork_targets", 1, calls, seconds, seconds=limit)[0])


def fork_targets(world: RankWorld, calls: Mapping[str, Sequence[Any]], seconds: float) -> dict[str, list[Any]]:
    """Run the target (module:function) of each call on forks of this rank. A failing call does not stop the others.

    Return a dict from the name of each call to the results of its ranks, or to one ``Failed``.
    """
    assert world.size == 1
    import_trainer(*sorted({target.partition(":")[0] for target, *_ in calls.values()}))
    import_model_parts("qwen3", "qwen3_moe")
    out: dict[str, list[Any]] = {}
    for name, (target, size, *args) in calls.items():
        try:
            out[name] = fork_ranks(pkgutil.resolve_name(target), size, *args, seconds=seconds)
        except AssertionError as error:
            out[name] = [Failed(str(error))]
    return out


def run_on_gpu(calls: Mapping[str, Sequence[Any]], **environment: str) -> Results:
    """Run ``target(world, *args)`` (module:function) of each call, in turn, in one process.

    Return a dict from the name of each call to a list with its result. The calls are not forked, because a process that
    has used a GPU cannot be. ``environment``: further environment variables.
    """
    seconds = 60 + 120 * len(calls)
    (out,) = run_ranks("tests.train.jobs:call_targets", 1, calls, seconds=seconds, environment=environment)
    return Results({name: [result] for name, result in out.items()})


def call_targets(world: RankWorld, calls: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Call the target of each call with this rank. A failing call does not stop the others.

    Return a dict from the name of each call to its result or ``Failed``.
    """
    import_trainer(*sorted({target.partition(":")[0] for target, *_ in calls.values()}), device="cuda")
    out: dict[str, Any] = {}
    for name, (target, *args) in calls.items():
        gc.collect()
        gc.freeze()  # so that later collections skip the objects that the calls share
        try:
            out[name] = pkgutil.resolve_name(target)(world, *args)
        except Exception:  # noqa: BLE001 (fault boundary: the test prints the error)
            out[name] = Failed(traceback.format_exc())
    return out


def prepare(jobs: Sequence[RankJob]) -> None:
    """Import the modules of the jobs, and share process groups between them."""
    import_trainer(*sorted({job.target.partition(":")[0] for job in jobs}))
    import_model_parts(*KINDS)
    reuse_groups()


def import_model_parts(*kinds: str) -> None:
    """Import what the trainer's ranks import when they build models: layers, families, and transformers' configs of ``kinds``."""
    modules = (
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "megatron.core.models.mimo",
        "slime_like_plugins.megatron_cpu.layer",
        "slime_like_plugins.qwen_gdn.spec",
        "slime_like_plugins.qwen_gdn.torch_chunk",
        *(f"transformers.models.{kind}.configuration_{kind}" for kind in ("auto", *kinds)),
        *sorted({family.path.partition(":")[0] for family in FAMILIES.values()}),
    )
    with heavy_imports(), without_model_classes():
        for name in modules:
            importlib.import_module(name)


def import_trainer(*modules: str, device: str = "cpu") -> None:
    """Import the trainer, then ``modules``, as its ranks do."""
    with heavy_imports():  # megatron collects garbage at every save and load
        from slime_like.train.megatron.platform import host

        host.install(device)
        rank_modules = (
            "slime_like.train.megatron.rank.critic",
            "slime_like.train.megatron.rank.teacher",
            "slime_like.train.megatron.rank.trainer",
        )
        for name in (*rank_modules, *modules):
            importlib.import_module(name)


def run_jobs(world: RankWorld, shared: Shared, jobs: Sequence[RankJob]) -> dict[str, Any]:
    """Run the jobs in turn in one process group. A failing job does not stop the others."""
    out: dict[str, Any] = {}
    for job in jobs:
        gc.collect()
        gc.freeze()  # so that megatron's garbage collections at saves and loads skip imported objects
        module, _, function = job.target.partition(":")
        job_shared = Shared(shared.models, shared.references, shared.scratch / job.name.replace(" ", "_"))
        try:
            out[job.name] = getattr(importlib.import_module(module), function)(world, job_shared, *job.args)
        except Exception:  # noqa: BLE001 (fault boundary: the test prints the error)
            out[job.name] = Failed(traceback.format_exc())
    return out


def reuse_groups() -> None:
    """Reuse the process groups of an earlier job with the same layout: each set of gloo groups leaves 60 threads."""
    from megatron.core import parallel_state

    groups_of: dict[str, dict[str, Any]] = {}
    stock = parallel_state.initialize_model_parallel

    def initialize(**sizes: Any) -> None:
        key = repr(sorted(sizes.items()))
        if key not in groups_of:
            stock(**sizes)
            groups_of[key] = {
                name: value for name, value in vars(parallel_state).items() if name[:1] == "_" != name[1:2]
            }
        parallel_state.__dict__.update(groups_of[key])

    parallel_state.initialize_model_parallel = initialize


def make_actor(world: RankWorld, folder: Path, layout: Layout, **spec: Any) -> RankTrainer:
    """Return a rank of a small trainer. Keyword arguments as for ``make_spec``."""
    return start_trainer(world, make_spec(folder, layout, **spec))


def start_trainer(world: RankWorld, spec: RankSpec, local_rank: int = 0) -> RankTrainer:
    """Join the world and build a rank of the trainer."""
    rank_info = join_and_make_groups(world, spec, local_rank)
    from slime_like.train.megatron.rank.trainer import RankTrainer

    return RankTrainer(spec, rank_info)


def save_checkpoint(trainer: RankModel, folder: Path, iteration: int) -> None:
    """Write a checkpoint and record it as the latest of ``folder``, as the driver does. Collective."""
    from slime_like.train.megatron.platform.collective import on_rank_zero

    trainer.begin_save(folder, iteration)
    trainer.finish_save(wait=True)
    on_rank_zero(lambda: name_latest(folder, iteration))


def join_and_make_groups(world: RankWorld, spec: RankSpec, local_rank: int = 0) -> RankInfo:
    """Join the world. megatron can be imported afterwards."""
    from slime_like.train.megatron.platform import groups

    master = RendezvousAddress(world.host, world.port)
    return groups.join_and_make_groups(
        spec, rank=world.rank, world_size=world.size, master=master, local_rank=local_rank
    )


def annotated(trainer: RankTrainer, micro_batches: Sequence[PackedBatch]) -> list[MicroBatch]:
    """Return ``micro_batches`` with the scores and advantages that the loss reads."""
    trainer.open_rollout([micro_batches])
    trainer.compute_advantages({})
    return trainer.close().micros


class Results(dict[str, list[Any]]):
    """Job name -> results of the ranks. Reading a failed job fails the test with its traceback."""

    def __getitem__(self, name: str) -> list[Any]:
        results = super().__getitem__(name)
        for rank, result in enumerate(results):
            assert not isinstance(result, Failed), f"job {name!r}, rank {rank}:\n{result.text}"
        return results
