"""Rank functions of tests of checkpoints, exports and training: train, save, load in another layout, export."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import multiprocessing
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import AlgoConfig, SftConfig
from slime_like.config.schema.resolved import Layout, TransportSpec
from slime_like.errors import SlimeLikeError
from slime_like.interfaces import Bucket
from slime_like.metrics.types import reduce_metrics
from slime_like.weight_sync.ipc import IpcSender
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.models import count_tokens, join_rows, make_rows, normalise
from tests.train.ranks import RankWorld
from tests.unchanged import unchanged
from tests.weight_sync.ipc_doubles import CopiedBytes, DeviceEngine


def batch(seed: int, version: int = 0) -> list[PackedBatch]:
    """Return two micro-batches of unequal weight: ten ragged sequences (fewer tokens for even seeds), and one of 31."""
    lengths = (23, 9, 14, 5, 2, 8, 6, 11, 17, 12) if seed % 2 else (7, 9, 3, 5, 2, 8, 6, 4, 10, 12)
    return _ragged([lengths, (31,)], seed, version)


def one_micro_batch(seed: int) -> list[PackedBatch]:
    """Return the sequences of ``batch(seed)`` in one micro-batch, for layouts without data parallelism."""
    return [join_rows(*batch(seed))]


def fewest_micro_batches(layout: Layout) -> Callable[[int], list[PackedBatch]]:
    """Return the function that makes the fewest micro-batches for ``layout``, because each needs collectives."""
    return batch if layout.dp > 1 else one_micro_batch


def few_micro_batches(layout: Layout) -> Callable[[int], list[PackedBatch]]:
    """Return the function that makes two micro-batches for a pipeline, and the fewest for another layout."""
    return batch if layout.pp > 1 else fewest_micro_batches(layout)


def four_micro_batches(seed: int) -> list[PackedBatch]:
    """Return four micro-batches, two for each of two data-parallel ranks."""
    return _ragged([(23, 9, 14), (31,), (5, 2, 8, 6, 11), (17, 12)], seed, 0)


def _ragged(lengths: Sequence[tuple[int, ...]], seed: int, version: int) -> list[PackedBatch]:
    return normalise([make_rows(row, 10 * seed + i, version=version) for i, row in enumerate(lengths)])


def train(
    actor: Any, layout: Layout, seed: int, steps: int = 1, make: Callable[[int], list[PackedBatch]] = batch
) -> dict[str, float]:
    """Train on one rollout of ``steps`` optimizer steps. Return the metrics on the reporter, {} elsewhere."""
    batches = [make(seed + k) for k in range(steps)]
    micro_batches = [b[actor.rank_info.dp_rank :: layout.dp] for b in batches]
    return reduce_metrics(actor.train_rollout(micro_batches, [count_tokens(b) for b in batches]))


def digest(actor: Any) -> str:
    """Return a hash of the bytes of this rank's weights."""
    sha = hashlib.sha256()
    for parameter in actor.model.parameters():
        sha.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# ---- checkpoints -----------------------------------------------------------------------------------------------------
def save_then_continue(
    world: RankWorld, shared: Shared, layout: Layout, kind: str = "tied", export: bool = False
) -> dict[str, Any]:
    """Take two optimizer steps, save, and take two more, which a resumed run must repeat.

    Return the losses of the last two steps, the digest of the final weights, and, as of the save, the names of the
    child processes and a random number. ``export``: also export the saved weights.
    """
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    make = fewest_micro_batches(layout)
    for seed in (1, 2):
        train(actor, layout, seed, make=make)
    save_checkpoint(actor, shared.scratch, 2)
    random_number = float(torch.rand(()))
    children = [child.name for child in multiprocessing.active_children()]
    if export:
        actor.export_hf(shared.scratch / "hf")
    losses = [train(actor, layout, seed, make=make).get("train/loss") for seed in (3, 4)]
    return {"losses": losses, "weights": digest(actor), "children": children, "random": random_number}


def resume(world: RankWorld, shared: Shared, saved_by: str, layout: Layout, lr: float = 1e-3) -> dict[str, Any]:
    """Load the checkpoint of job ``saved_by`` and take the same two further optimizer steps."""
    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig(), optim={"lr": lr})
    iteration = actor.load(shared.scratch.with_name(saved_by.replace(" ", "_")))
    version, random_number = actor.version, float(torch.rand(()))
    metrics = [train(actor, layout, seed, make=fewest_micro_batches(layout)) for seed in (3, 4)]
    return {
        "iteration": iteration,
        "version": version,
        "random": random_number,
        "losses": [m.get("train/loss") for m in metrics],
        "lr": metrics[0].get("train/lr"),
        "weights": digest(actor),
    }


def same_bits(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Take two optimizer steps under ``run.deterministic``, save, and take two more.

    Repeat the last two in a second run, in a resumed run, and (as a contrast) from the saved weights alone.
    """
    kind: dict[str, Any] = {"algo": SftConfig(), "deterministic": True}
    folder = shared.models["two layers"]
    out: dict[str, Any] = {}
    for name in ("first run", "second run"):
        actor = make_actor(world, folder, layout, **kind)
        for seed in (1, 2):
            train(actor, layout, seed)
        if name == "first run":
            save_checkpoint(actor, shared.scratch, 2)
        out[name] = _two_more(actor, layout)
    resumed = make_actor(world, folder, layout, **kind)
    resumed.load(shared.scratch)
    out["resumed"] = _two_more(resumed, layout)
    model = {"megatron_checkpoint": str(shared.scratch)}
    out["weights alone"] = _two_more(make_actor(world, folder, layout, model=model, **kind), layout)
    return out


def _two_more(actor: Any, layout: Layout) -> tuple[str, list[Any]]:
    losses = [train(actor, layout, seed).get("train/loss") for seed in (3, 4)]
    return digest(actor), losses


def resume_from_each(
    world: RankWorld, shared: Shared, sources: Sequence[str], layout: Layout, kind: str = "tied"
) -> dict[str, list[Any]]:
    """Return the next two losses after loading the checkpoint of each source, one after another on the same actor."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    make = fewest_micro_batches(layout)
    out: dict[str, list[Any]] = {}
    for source in sources:
        actor.load(shared.scratch.with_name(f"reshard_from_{source}".replace(" ", "_")))
        out[source] = [train(actor, layout, seed, make=make).get("train/loss") for seed in (3, 4)]
    return out


DAMAGES = (
    "nothing there",
    "latest lost",
    "latest is not a number",
    "metadata lost",
    "shard cut",
    "shard flipped",
    "other model",
    "plain optimizer",
)


def load_damaged(world: RankWorld, shared: Shared, saved_by: str) -> dict[str, str]:
    """Return class and message of the error on loading each damaged or foreign checkpoint, which stays unchanged."""
    source = shared.scratch.with_name(saved_by.replace(" ", "_"))
    out: dict[str, str] = {}
    for name in DAMAGES:
        folder = shared.scratch / name
        if name != "nothing there":
            shutil.copytree(source, folder)
        _damage(folder, name)
        model = shared.models["untied" if name == "other model" else "tied"]
        layout = Layout(distributed_optimizer=name != "plain optimizer")
        actor = make_actor(world, model, layout, algo=SftConfig())
        with unchanged(folder):
            out[name] = _error(lambda a=actor, f=folder: a.load(f))
    return out


def _damage(folder: Path, name: str) -> None:
    match name:
        case "latest is not a number":
            (folder / "latest_checkpointed_iteration.txt").write_text("ten")
        case "latest lost":
            (folder / "latest_checkpointed_iteration.txt").unlink()
        case "shard flipped":
            shard = sorted((folder / "iter_0000002").glob("*.distcp"))[-1]
            content = bytearray(shard.read_bytes())
            content[len(content) // 2] ^= 1  # within a tensor: torch reads it without an error
            shard.write_bytes(content)
        case "metadata lost":
            (folder / "iter_0000002" / "metadata.json").unlink()
        case "shard cut":
            for shard_file in (folder / "iter_0000002").glob("*.distcp"):
                with shard_file.open("r+b") as file:
                    file.truncate(shard_file.stat().st_size // 3)
        case _:
            pass


def _error(function: Callable[[], Any]) -> str:
    try:
        function()
    except SlimeLikeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- export ----------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class ExportedWeights:
    """An export, and the trainer's scores with the same weights."""

    folder: Path
    manifest: list[tuple[str, tuple[int, ...], str]]
    buckets: list[list[tuple[str, tuple[int, ...], str]]]  # (name, shape, dtype) per bucket
    bucket_bytes: list[int]
    replicated: list[list[tuple[str, str]]]  # name and hash of the bytes, per bucket that every rank gets
    sent: dict[str, str]  # name -> hash of the bytes, of the tensors that a sender gathers
    is_sender: bool
    rows: PackedBatch
    scores: np.ndarray | None


def round_trip(world: RankWorld, shared: Shared, kind: str, layout: Layout) -> Path:
    """Load and export without training. Return the exported folder."""
    make_actor(world, shared.models[kind], layout).export_hf(shared.scratch / "hf")
    return shared.scratch / "hf"


def export(
    world: RankWorld, shared: Shared, kind: str, layout: Layout, max_bytes: int, dtype: str = "float32"
) -> ExportedWeights:
    """Take one optimizer step, then export to a folder and in buckets."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig(), dtype=dtype)
    train(actor, layout, 1)
    actor.export_hf(shared.scratch / "hf")
    source = actor.hf_export
    buckets: list[list[tuple[str, tuple[int, ...], str]]] = []
    sizes: list[int] = []
    sent: dict[str, str] = {}
    for bucket in source.buckets(max_bytes):
        sent |= _hashes(bucket)
        buckets.append([(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in bucket.tensors])
        sizes.append(sum(t.numel() * t.element_size() for _, t in bucket.tensors))
    micro_batch = batch(1)[0]
    return ExportedWeights(
        folder=shared.scratch / "hf",
        manifest=[(m.name, m.shape, m.dtype) for m in source.manifest()],
        buckets=buckets,
        bucket_bytes=sizes,
        replicated=[list(_hashes(bucket).items()) for bucket in source.replicated_buckets(max_bytes)],
        sent=sent,
        is_sender=source.is_sender,
        rows=micro_batch,
        scores=actor.score(micro_batch),
    )


def _hashes(bucket: Bucket) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in bucket.tensors
    }


def push_to_engine(world: RankWorld, shared: Shared, kind: str, layout: Layout) -> dict[str, Any]:
    """Push twice to an engine with as many ranks as this world. Return sent names, received and expected hashes."""
    source = make_actor(world, shared.models[kind], layout).hf_export
    engine: Any = DeviceEngine(tuple(range(layout.world_size)), CopiedBytes())
    transport = TransportSpec("ipc", "gloo", 40_000, 60.0)
    pushes: list[list[str]] = []
    for _ in range(2):  # by two senders, as after the loss of an engine
        sender = IpcSender([engine], transport=transport, group_name="", host="", handles=CopiedBytes())
        pushes.append([meta.name for meta in asyncio.run(sender.send(source))])
    assert pushes[0] == pushes[1]
    expected: dict[str, str] = {}
    for bucket in source.replicated_buckets(40_000):
        expected |= _hashes(bucket)
    received = [_hashes(Bucket(tuple(tensors.items()))) for tensors in engine.ranks]
    return {"requests": engine.num_requests, "reported": pushes[0], "received": received, "expected": expected}


# ---- training --------------------------------------------------------------------------------------------------------
def rollouts(
    world: RankWorld,
    shared: Shared,
    layout: Layout,
    algo: AlgoConfig,
    steps: int,
    count: int,
    spec: dict[str, Any],
    kind: str = "tied",
) -> list[dict[str, float]]:
    """Return the metrics of ``count`` rollouts on the same rows, with ``steps`` optimizer steps each."""
    actor = make_actor(world, shared.models[kind], layout, algo=algo, steps_per_rollout=steps, **spec)
    return [train(actor, layout, 1, steps, few_micro_batches(layout)) for _ in range(count)]
