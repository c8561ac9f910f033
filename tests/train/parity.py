"""What test_parity compares: an HF reference computed in one process, and what each rank of a layout gets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.batch import Rows
from slime_like.config.algo import GrpoConfig
from slime_like.config.resolved import Layout
from slime_like.metrics.types import reduce_metrics
from tests.train.jobs import Shared, make_actor
from tests.train.models import count_tokens, joined, make_rows, normalised
from tests.train.ranks import World

TEMPERATURE = 0.7
ENTROPY = 0.05
ALGO = GrpoConfig(entropy_coef=ENTROPY)
DECAYS = ("A_log", "dt_bias")
SP = {"tp": 2, "sequence_parallel": True}


def batch() -> list[Rows]:
    """Four ragged micro-batches of unequal weight: one sequence, many, a very short one."""
    lengths = [(23, 9, 14), (31,), (5, 2, 8, 6, 11), (17, 12)]
    return normalised([make_rows(row, seed) for seed, row in enumerate(lengths)])


@dataclasses.dataclass(frozen=True)
class Reference:
    """One optimizer step's worth of gradients by transformers, sequence by sequence, without packing."""

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    logprobs: list[np.ndarray]  # [T] per micro-batch


def reference(folder: Path) -> Reference:
    """HF's loss and gradients of ``batch()``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    total = torch.zeros(())
    columns: list[np.ndarray] = []
    for rows in batch():
        column = np.zeros(len(rows.token_ids), np.float32)
        for s, (start, stop) in enumerate(zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True)):
            ids = torch.from_numpy(rows.token_ids[start:stop].astype(np.int64))[None]
            log_p = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float() / TEMPERATURE, -1)
            logprobs = log_p.gather(1, ids[0, 1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            assert rows.advantages is not None
            losses = -(logprobs - logprobs.detach()).exp() * float(rows.advantages[s]) - ENTROPY * entropy
            total = total + (torch.from_numpy(rows.loss_weight[start + 1 : stop]) * losses).sum()
            column[start + 1 : stop] = logprobs.detach().numpy()
        columns.append(column)
    total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten().double() for g in grads.values()]).norm()
    return Reference(float(total.detach()), float(norm), grads, columns)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Largest relative errors over all ranks. A gradient's error is relative to the maximum of its whole tensor.

    That of a decay is a sum over all tokens whose terms all but cancel: rounding shows there first, transformers' own.
    """

    loss: float
    grad_norm: float
    grad: float
    worst_grad: str
    score: float  # absolute
    decay: float = 0.0  # as ``grad``, of the decays of Gated DeltaNet layers

    @property
    def worst(self) -> float:
        """The number that has a bound."""
        return max(self.loss, self.grad_norm, self.grad)


def compare(
    world: World, shared: Shared, kind: str, layout: Layout, model: dict[str, Any], fault: str | None
) -> Comparison | None:
    """Train one step in ``layout`` and compare with HF. The comparison on the reporter, None elsewhere."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return _compare(world, shared, kind, layout, model)


def _compare(world: World, shared: Shared, kind: str, layout: Layout, model: dict[str, Any]) -> Comparison | None:
    from slime_like.train.megatron.forward import make_micro

    ref: Reference = shared.references[kind]
    actor = make_actor(world, shared.models[kind], layout, algo=ALGO, temperature=TEMPERATURE, model=model)
    rows = batch()
    mine = rows[actor.dp_rank :: layout.dp]
    if layout.vpp > 1 and layout.dp == 1:  # an odd number, which the interleaved schedule does not take as it is
        mine = [joined(mine[0], mine[1]), *mine[2:]]
    count = count_tokens(rows)
    scores = [actor.score(r) for r in rows]
    trainer = actor.trainer
    micros = [make_micro(r, trainer.place) for r in mine]
    trainer.annotate(micros)
    trainer.optimizer_step.backward(micros, count, 0)
    errors = gradient_errors(trainer, ref.grads)
    metrics = reduce_metrics(actor.step([mine], [count]))
    if not actor.is_reporter:
        return None
    score = max(
        float(np.abs(s - expected).max()) for s, expected in zip(scores, ref.logprobs, strict=True) if s is not None
    )
    decays = [error for name, error in errors.items() if name.endswith(DECAYS)]
    errors = {name: error for name, error in errors.items() if not name.endswith(DECAYS)}
    worst = max(errors, key=lambda name: errors[name])
    return Comparison(
        loss=abs(metrics["train/loss"] / ref.loss - 1),
        grad_norm=abs(metrics["train/grad_norm"] / ref.grad_norm - 1),
        grad=errors[worst],
        worst_grad=worst,
        score=score,
        decay=max(decays, default=0.0),
    )


def gradient_errors(trainer: Any, grads: dict[str, Tensor]) -> dict[str, float]:
    """Parameter key -> largest error of any rank's reduced gradient over the maximum of the whole HF tensor."""
    from slime_like.train.megatron.model import named_weights

    place = trainer.place
    if place.layout.distributed_optimizer:
        _gather_gradients(trainer.wrapped)
    errors: dict[str, float] = {}
    for key, parameter in named_weights(trainer.model):
        weight = trainer.table[key]
        whole = [grads[name] for name in weight.names]
        expected = weight.split(whole, place.layout.tp, place.tp_rank)
        top = max(float(g.abs().max()) for g in whole)
        found: Any = parameter
        errors[key] = float((found.main_grad.float() - expected).abs().max()) / top
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    return {key: max(e[key] for e in everyone if key in e) for key in {k for e in everyone for k in e}}


def _gather_gradients(wrapped: Any) -> None:
    """The distributed optimizer reduces only a shard of each bucket to a rank: put the shards together."""
    for group in [group for chunk in wrapped for group in chunk.bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_single(bucket.grad_data, mine, group=ranks)


# ---- planted faults --------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Generator[None]:
    """``target.name = value`` for a while."""
    stock = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, stock)


def skipped_tp_reduction() -> Any:
    """The hidden states' gradient is not summed over the tensor parallel ranks, which hold parts of the vocabulary."""
    from slime_like.train.megatron import model

    stock = model.gather_from_sequence_parallel_region
    return replaced(
        model, "gather_from_sequence_parallel_region", lambda x, **_: stock(x, tensor_parallel_output_grad=False)
    )


def shifted_positions() -> Any:
    """Every token gets its neighbour's position (a constant shift would change nothing: RoPE is relative)."""
    from slime_like.train.megatron import forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        return dataclasses.replace(layout, position_ids=np.roll(layout.position_ids, 1))

    stock = forward.token_layout
    return replaced(forward, "token_layout", shifted)


def denominator_per_micro_batch() -> Any:
    """Each micro-batch's loss is divided by its own weight."""
    from slime_like.train.megatron.step import PolicyStep

    def averaged(self: Any, micro: Any, *args: Any) -> Any:
        loss, count = stock(self, micro, *args)
        return loss / float(micro.rows.loss_weight.sum()) / 4, count

    stock = PolicyStep._loss_of
    return replaced(PolicyStep, "_loss_of", averaged)


def shuffled_biases() -> Any:
    """Query, key and value biases are stacked as three matrices instead of by query group."""
    from slime_like.train.megatron.families import base

    def split(self: Any, tensors: Any, tp: int, rank: int) -> Tensor:
        if tensors[0].ndim == 1:
            return torch.cat([t.chunk(tp, 0)[rank] for t in tensors], 0)
        return stock(self, tensors, tp, rank)

    stock = base.QKV.split
    return replaced(base.QKV, "split", split)


def swapped_chunks() -> Any:
    """Under context parallelism a rank holds its two chunks of each sequence in the wrong order."""
    from slime_like.train.megatron import forward

    def swapped(*args: Any, **kwargs: Any) -> Any:
        layout = stock(*args, **kwargs)
        halves = np.diff(layout.padded_cu_seqlens) // kwargs["cp"] // 2
        starts = np.cumsum(2 * halves) - 2 * halves
        order = np.concatenate([np.roll(np.arange(s, s + 2 * h), h) for s, h in zip(starts, halves, strict=True)])
        return dataclasses.replace(layout, row_index=layout.row_index[order], next_index=layout.next_index[order])

    stock = forward.token_layout
    return replaced(forward, "token_layout", swapped)


def dropped_norm_reduction() -> Any:
    """Under sequence parallelism the norms' gradients stay those of each rank's own tokens."""
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")  # a function shadows its name
    return replaced(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None)


def columns_of_one_rank() -> Any:
    """Under context parallelism scores are those of each rank's own part of the sequences."""
    from slime_like.train.megatron import forward

    return replaced(forward, "sum_columns", lambda columns, group: list(columns))


FAULTS: dict[str, Callable[[], Any]] = {
    "swapped_chunks": swapped_chunks,
    "dropped_norm_reduction": dropped_norm_reduction,
    "columns_of_one_rank": columns_of_one_rank,
    "skipped_tp_reduction": skipped_tp_reduction,
    "shifted_positions": shifted_positions,
    "denominator_per_micro_batch": denominator_per_micro_batch,
    "shuffled_biases": shuffled_biases,
}
