"""Cases of a trainer rank on a phantom GPU. Each returns numbers of calls or sizes; values mean nothing."""

from __future__ import annotations

import gc
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.config.schema.residency import COLLECT, PUSH, SAVE, STEP, TRAINER_PHASES
from slime_like.config.schema.resolved import CriticSpec, Layout, RankSpec
from slime_like.phantom.counters import pinned_bytes, read_counts
from tests.train.jobs import Failed
from tests.train.models import count_tokens, make_rows, make_spec, normalise
from tests.train.ranks import RankWorld

HALF: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}
LENGTHS = (24, 8, 16, 16)  # equal micro-batches, so that pipeline stages exchange equal shapes


def run_cases(world: RankWorld, cases: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the result of each case's ``function(*args)``, or ``Failed``: a failing case does not stop the others."""
    del world
    functions: dict[str, Callable[..., Any]] = {
        f.__name__: f
        for f in (steps, critic, teacher, save_and_load, guard, replay, overlapped_offload, residency, waits)
    }
    out: dict[str, Any] = {}
    for name, (function, *args) in cases.items():
        gc.collect()
        gc.freeze()  # so that later collections skip what every case shares
        torch.cuda.empty_cache()
        try:
            out[name] = functions[function](*args)
        except Exception:  # noqa: BLE001 (fault boundary: the test prints the error)
            out[name] = Failed(traceback.format_exc())
    return out


def make_trainer(folder: Path, layout: Layout, rank: int = 0, **spec: Any) -> Any:
    info, rank_spec = join(folder, layout, rank, **spec)
    from slime_like.train.megatron.rank.trainer import RankTrainer

    return RankTrainer(rank_spec, info)


def join(folder: Path, layout: Layout, rank: int = 0, **spec: Any) -> tuple[Any, RankSpec]:
    from slime_like.train.megatron.trace import solo

    rank_spec = make_spec(folder, layout, **{**HALF, **spec})
    return solo.join(rank_spec, rank), rank_spec


def batches(num_micros: int = 2, seed: int = 0) -> list[PackedBatch]:
    return normalise([make_rows(LENGTHS, seed + i) for i in range(num_micros)])


def train(trainer: Any, num_micros: int = 2, num_steps: int = 1) -> None:
    micros = batches(num_micros)
    count = count_tokens(micros) * trainer.rank_info.layout.dp
    trainer.train_rollout([micros] * num_steps, [count] * num_steps)


def steps(folder: Path, layout: Layout, rank: int = 0, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build a rank, take two steps, score, and export."""
    trainer = make_trainer(folder, layout, rank, **(options or {}))
    before = read_counts()
    for _ in range(2):
        train(trainer, 2 * layout.pp)
    counts = read_counts() - before
    score = None if layout.vpp > 1 else trainer.score(batches(1)[0])  # padding has another shape
    exported = sum(len(bucket.tensors) for bucket in trainer.hf_export.buckets(1 << 20))
    return {
        "launches": counts.launches,
        "products": counts.products,
        "collectives": counts.collectives,
        "version": trainer.version,
        "score": None if score is None else len(score),
        "exported": exported,
        "manifest": len(trainer.hf_export.manifest()),
        "replicated": sum(len(bucket.tensors) for bucket in trainer.hf_export.replicated_buckets(1 << 20)),
        "devices": sorted({str(p.device) for p in trainer.model.parameters()}),
    }


def waits(folder: Path, layout: Layout, num_micros: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the functions of this project and megatron in which the host waits in a step, with counts and lines.

    Also returns the number of parameters, and the shapes of the tensors that the step has left in a graph.
    """
    earlier = _graph_tensors()
    trainer = make_trainer(folder, layout, **options)
    train(trainer, num_micros)
    lines: Counter[str] = Counter()
    places: dict[str, str] = {}

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message):
            frames = [
                f for f in traceback.extract_stack() if "/slime_like/" in f.filename or "/megatron/" in f.filename
            ]
            frame = frames[-1]
            function = f"{frame.filename.rpartition('/')[2]}:{frame.name}"
            lines[function] += 1
            places[function] = f"{frame.filename}:{frame.lineno}: {frame.line}"

    with warnings.catch_warnings():
        warnings.showwarning = note
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(trainer, num_micros)
        finally:
            torch.cuda.set_sync_debug_mode(0)
    gc.collect()
    graph_shapes = [shape for key, shape in _graph_tensors().items() if key not in earlier]
    parameters = sum(1 for _ in trainer.model.parameters())
    return {"lines": dict(lines), "places": places, "parameters": parameters, "graphs": graph_shapes}


def _graph_tensors() -> dict[int, tuple[int, ...]]:
    """Return the shapes of the tensors that are part of a graph, by identity, except tensors of torch's compiler."""
    objects = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return {id(x): tuple(x.shape) for x in objects if x.grad_fn is not None}


def critic(folder: Path, layout: Layout) -> dict[str, Any]:
    """Return the sizes of a critic's values, and its version after an update."""
    info, spec = join(folder, layout)
    from slime_like.train.megatron.rank.critic import RankCritic

    rank = RankCritic(CriticSpec(spec, value_clip=0.2, load=None, warmup_rollouts=0), info)
    micros = batches()
    values, _ = rank.score([micros])
    assert values is not None
    rank.update(values, [count_tokens(micros) * layout.dp])
    return {"values": [len(column) for step in values for column in step], "version": rank.version}


def teacher(folder: Path, layout: Layout) -> dict[str, Any]:
    """Return the sizes of a teacher's columns, and its device memory besides the weights, relative to the weights."""
    info, spec = join(folder, layout)
    gc.collect()
    before = torch.cuda.memory_allocated()
    from slime_like.train.megatron.rank.teacher import RankTeacher

    rank = RankTeacher(spec, info)
    weights = sum(p.numel() * p.element_size() for p in rank.model.parameters())
    scores, _ = rank.score([batches()])
    assert scores is not None
    gc.collect()
    extra = torch.cuda.memory_allocated() - before - weights
    return {"scores": [len(column) for step in scores for column in step], "extra": extra / weights}


def save_and_load(folder: Path, scratch: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Save while a step is taken, load into a new rank, and export an HF folder."""
    trainer = make_trainer(folder, Layout(), **options)
    train(trainer)
    trainer.begin_save(scratch, 3)
    train(trainer)
    is_finished = trainer.finish_save(wait=True)
    from slime_like.checkpoint.files import name_latest

    name_latest(scratch, 3)
    resumed = make_trainer(folder, Layout(), **options)
    iteration = resumed.load(scratch)
    train(resumed)
    resumed.export_hf(scratch / "hf")
    return {
        "finished": is_finished,
        "iteration": iteration,
        "version": resumed.version,
        "exported": sorted(file.name for file in (scratch / "hf").iterdir()),
    }


def guard(folder: Path, scratch: Path, layout: Layout, checks: str) -> dict[str, Any]:
    """Take steps with the memory guard; release the communicators between them."""
    spec = GuardSpec(
        wrap=True,
        default=MemoryPolicy(checks=checks),
        folder=str(scratch),
        name="trainer",
        release=True,
        deadline_s=600,
    )
    from slime_like.distributed.wrapper import install
    from slime_like.train.megatron.trace import solo

    try:
        trainer = make_trainer(folder, layout, guard=spec)
        train(trainer)
        wrapper = install.current()
        assert wrapper is not None
        generation, free = wrapper.generation, torch.cuda.mem_get_info()[0]
        install.release()
        train(trainer)
        counters = {counter.op.name: (counter.calls, counter.checks) for counter in wrapper.counters()}
        return {
            "generations": wrapper.generation - generation,
            "version": trainer.version,
            "source": wrapper.guard.source.name,
            "all_reduce": counters["all_reduce"],
            "free": free,
        }
    finally:
        solo.leave()
        install.remove()


def replay(folder: Path, mode: str) -> dict[str, Any]:
    """Train with replayed experts of the old policy's pass."""
    trainer = make_trainer(folder, Layout(), algo=GrpoConfig(routing_replay=mode), steps_per_rollout=2)
    train(trainer, num_steps=2)
    return {"version": trainer.version}


def overlapped_offload(folder: Path, fraction: float) -> dict[str, Any]:
    """Return a rank's device and pinned memory in bytes per parameter, and its number of offloading optimizers."""
    optim = {"cpu_offload": True, "cpu_offload_fraction": fraction}
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()  # as in a worker, which then freezes all objects
    trainer = make_trainer(folder, Layout(), optim=optim)
    num_optimizers = sum(type(x).__name__ == "HybridDeviceOptimizer" for x in gc.get_objects())
    gc.enable()
    train(trainer)
    gc.collect()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {
        "optimizers": num_optimizers,
        "device": (torch.cuda.memory_allocated() - before) / parameters,
        "pinned": pinned_bytes() / parameters,
        "version": trainer.version,
    }


def residency(folder: Path, optim: Mapping[str, Any]) -> dict[str, float]:
    """Return the allocated bytes per parameter in each phase, and those reserved while engines collect."""
    gc.collect()
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trainer = make_trainer(folder, Layout(), optim=optim)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    train(trainer)
    out: dict[str, float] = {}
    for phase in (PUSH, SAVE, STEP, COLLECT):
        gc.collect()
        trainer.device_state.keep(TRAINER_PHASES[phase])
        out[phase] = (torch.cuda.memory_allocated() - allocated) / parameters
    out["reserved"] = (torch.cuda.memory_reserved() - reserved) / parameters
    trainer.device_state.keep(TRAINER_PHASES[STEP])
    train(trainer)
    return out
