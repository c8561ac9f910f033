"""Rank functions of test_checkpoint and test_training: train, save, load in another layout, export, report."""

from __future__ import annotations

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
from slime_like.config.schema.algo import AlgoConfig, GrpoConfig, SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import SlimeLikeError
from slime_like.metrics.types import reduce_metrics
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, annotated, make_actor, save_checkpoint
from tests.train.models import count_tokens, join_rows, make_rows, normalise
from tests.train.ranks import RankWorld
from tests.unchanged import unchanged


def batch(seed: int, version: int = 0) -> list[PackedBatch]:
    """Return two ragged micro-batches of unequal weight: many sequences (fewer tokens if ``seed`` is even), and one sequence."""
    lengths = (23, 9, 14, 5, 2, 8, 6, 11, 17, 12) if seed % 2 else (7, 9, 3, 5, 2, 8, 6, 4, 10, 12)
    return _ragged([lengths, (31,)], seed, version)


def one_micro_batch(seed: int) -> list[PackedBatch]:
    """Return the sequences of ``batch(seed)`` in one micro-batch, for layouts without data parallelism."""
    return [join_rows(*batch(seed))]


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
    """Take two optimizer steps, save, and take two more, which a resumed run must repeat. ``export``: also export the saved weights."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    for seed in (1, 2):
        train(actor, layout, seed)
    save_checkpoint(actor, shared.scratch, 2)
    random_number = float(torch.rand(()))
    children = [child.name for child in multiprocessing.active_children()]
    if export:
        actor.export_hf(shared.scratch / "hf")
    losses = [train(actor, layout, seed).get("train/loss") for seed in (3, 4)]
    return {"losses": losses, "weights": digest(actor), "children": children, "random": random_number}


def resume(world: RankWorld, shared: Shared, saved_by: str, layout: Layout, lr: float = 1e-3) -> dict[str, Any]:
    """Load the checkpoint of job ``saved_by`` and take the same two optimizer steps."""
    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig(), optim={"lr": lr})
    iteration = actor.load(shared.scratch.with_name(saved_by.replace(" ", "_")))
    version, random_number = actor.version, float(torch.rand(()))
    metrics = [train(actor, layout, seed) for seed in (3, 4)]
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

    Repeat the last two after a load, from the start with the same seeds, and (as a contrast) from the saved weights alone.
    """
    kind: dict[str, Any] = {"algo": SftConfig(), "deterministic": True}
    out: dict[str, Any] = {}
    for name in ("first run", "second run"):
        actor = make_actor(world, shared.models["tied"], layout, **kind)
        for seed in (1, 2):
            train(actor, layout, seed)
        if name == "first run":
            save_checkpoint(actor, shared.scratch, 2)
        out[name] = _two_more(actor, layout)
    resumed = make_actor(world, shared.models["tied"], layout, **kind)
    resumed.load(shared.scratch)
    out["resumed"] = _two_more(resumed, layout)
    model = {"megatron_checkpoint": str(shared.scratch)}
    out["weights alone"] = _two_more(make_actor(world, shared.models["tied"], layout, model=model, **kind), layout)
    return out


def _two_more(actor: Any, layout: Layout) -> tuple[str, list[Any]]:
    losses = [train(actor, layout, seed).get("train/loss") for seed in (3, 4)]
    return digest(actor), losses


def resume_from_each(
    world: RankWorld, shared: Shared, sources: Sequence[str], layout: Layout, kind: str = "tied"
) -> dict[str, list[Any]]:
    """Return the next two losses after loading the checkpoint of each source, one after another on the same actor."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    make = batch if layout.dp > 1 else one_micro_batch
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
            for cut in (folder / "iter_0000002").glob("*.distcp"):
                with cut.open("r+b") as file:
                    file.truncate(cut.stat().st_size // 3)
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
    for bucket in source.buckets(max_bytes):
        buckets.append([(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in bucket.tensors])
        sizes.append(sum(t.numel() * t.element_size() for _, t in bucket.tensors))
    micro_batch = batch(1)[0]
    return ExportedWeights(
        folder=shared.scratch / "hf",
        manifest=[(m.name, m.shape, m.dtype) for m in source.manifest()],
        buckets=buckets,
        bucket_bytes=sizes,
        is_sender=source.is_sender,
        rows=micro_batch,
        scores=actor.score(micro_batch),
    )


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
    return [train(actor, layout, 1, steps) for _ in range(count)]


class FakeClock:
    """Module ``time`` of a trainer, whose clock advances only by the calls of ``advance``."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Return the seconds so far."""
        return self.now

    def advance[**P, R](self, seconds: float, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` with a duration of ``seconds``."""

        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            self.now += seconds
            return function(*args, **kwargs)

        return timed


def durations(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Return the perf metrics of a rollout of two optimizer steps of 1 s each, with scoring passes of 10 s."""
    from slime_like.train.megatron.rank import trainer

    clock, algo = FakeClock(), GrpoConfig(kl_loss_coef=0.1)
    actor = make_actor(world, shared.models["tied"], layout, algo=algo, steps_per_rollout=2)
    with (
        replace_attribute(trainer, "time", clock),
        replace_attribute(trainer, "score_micros", clock.advance(10.0, trainer.score_micros)),
        replace_attribute(actor, "optimizer_step", clock.advance(1.0, actor.optimizer_step)),
    ):
        metrics = train(actor, layout, 1, steps=2)
    return {name: value for name, value in metrics.items() if name.startswith("perf/")}


def steps_or_rollouts(world: RankWorld, shared: Shared, layout: Layout) -> list[tuple[float, str]]:
    """Return mean gradient norm and weights after two unequal batches: as two optimizer steps of one rollout, and as two rollouts."""
    out: list[tuple[float, str]] = []
    for steps in (2, 1):
        actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig(), steps_per_rollout=steps)
        norms = [train(actor, layout, seed, steps)["train/grad_norm"] for seed in range(1, 3, steps)]
        out.append((float(np.mean(norms)), digest(actor)))
    return out


def off_policy(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, Any]:
    """Train on rollout log-probabilities that are the trainer's plus 0.25; one of the micro-batches has another version."""
    actor = make_actor(world, shared.models["tied"], layout)
    micro_batches = batch(1)
    scored: list[PackedBatch] = []
    for i, row in enumerate(micro_batches):
        score = _from_reporter(actor.score(row))
        trained_T = row.loss_weight > 0
        scored.append(
            dataclasses.replace(
                row,
                rollout_logprobs=np.where(trained_T, score + 0.25, 0).astype(np.float32),
                versions=np.where(trained_T, 1 if i == 1 else 0, -1).astype(np.int32),
            )
        )
    shard = scored[actor.rank_info.dp_rank :: layout.dp]
    metrics = actor.train_rollout([shard], [count_tokens(micro_batches)])
    return {
        "metrics": reduce_metrics(metrics),
        "stale": count_tokens(micro_batches[1:2]),
        "all": count_tokens(micro_batches),
    }


def idle_ranks(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Train on two micro-batches. With dp=2, the second rank has one without trained tokens and an empty one."""
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(entropy_coef=0.1))
    micro_batches = batch(1)
    untrained = dataclasses.replace(micro_batches[0], loss_weight=np.zeros_like(micro_batches[0].loss_weight))
    shard = [micro_batches, [untrained, make_rows([], 0)]][actor.rank_info.dp_rank]
    return reduce_metrics(actor.train_rollout([shard], [count_tokens(micro_batches)]))


def bad_rows(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, str]:
    """Return the errors on a token id outside the vocabulary and a NaN advantage, and whether weights changed."""
    actor = make_actor(world, shared.models["tied"], layout)
    micro_batches, before = batch(1), digest(actor)
    out: dict[str, str] = {}
    foreign = dataclasses.replace(micro_batches[0], token_ids=micro_batches[0].token_ids + np.int32(200))
    nan = dataclasses.replace(
        micro_batches[0], advantages=np.full(len(micro_batches[0].sample_ids), np.nan, np.float32)
    )
    for name, bad in {"foreign token": foreign, "nan": nan}.items():
        try:
            actor.train_rollout([[bad]], [count_tokens([bad])])
        except Exception as error:  # noqa: BLE001 (any error is a result)
            out[name] = f"{type(error).__name__}: {error}"
    return out | {"weights": "unchanged" if digest(actor) == before else "changed"}


def another_reference(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, float]:
    """Return the metrics of a first rollout whose reference is another checkpoint than the policy's."""
    model = {"ref_checkpoint": str(shared.models["untied"])}
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(kl_loss_coef=0.1), model=model)
    return train(actor, layout, 1)


def rotary_frequencies(world: RankWorld, shared: Shared) -> dict[str, float | str]:
    """Return the largest difference from transformers' frequencies per kind of scaling, or the error on an unsupported kind."""
    import copy

    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from slime_like.train.megatron.families.hf import HFFolder
    from slime_like.train.megatron.model.rotary import Rotary

    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "longrope": {"factor": 4.0},
    }
    out: dict[str, float | str] = {}
    for kind, parameters in kinds.items():
        hf = copy.deepcopy(HFFolder(shared.models["tied"]).config())
        hf.rope_parameters = {"rope_type": kind, "rope_theta": 5e5, **parameters}
        try:
            frequencies = Rotary(hf, hf.head_dim, torch.device("cpu")).frequencies
        except SlimeLikeError as error:
            out[kind] = f"{type(error).__name__}: {error}"
            continue
        expected: Any = Qwen3RotaryEmbedding(hf).inv_freq
        out[kind] = float((frequencies - expected).abs().max())
    return out


def _from_reporter(score: np.ndarray | None) -> np.ndarray:
    import torch.distributed as dist

    scores: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scores, score)
    (reported_score,) = [s for s in scores if s is not None]
    return reported_score


def reference_swap(world: RankWorld, shared: Shared, layout: Layout) -> dict[str, bool]:
    """Return checks that the reference keeps the scores of the initial weights, and the policy is restored bit for bit."""
    actor = make_actor(world, shared.models["tied"], layout, algo=GrpoConfig(kl_loss_coef=0.1))
    micro_batch = batch(5)[0]
    first = actor.score(micro_batch)
    train(actor, layout, 1)
    policy_digest, trained_scores = digest(actor), actor.score(micro_batch)
    assert actor.reference is not None
    with actor.swap_weights(actor.reference):
        swapped_digest, referenced = digest(actor), actor.score(micro_batch)
    (micro,) = annotated(actor, [micro_batch])
    assert micro.ref_logprobs is not None
    column = np.where(micro_batch.loss_weight > 0, micro.ref_logprobs.numpy(), 0.0)
    return {
        "scores of the loss are the reference's": first is None
        or bool(np.allclose(column, np.where(micro_batch.loss_weight > 0, first, 0.0), rtol=0, atol=1e-5)),
        "policy restored": digest(actor) == policy_digest,
        "weights differ while swapped": swapped_digest != policy_digest,
        "reference scores kept": first is None or bool(np.array_equal(referenced, first)),  # pyright: ignore[reportArgumentType]
        "policy moved": first is None or not np.array_equal(trained_scores, first),  # pyright: ignore[reportArgumentType]
    }
