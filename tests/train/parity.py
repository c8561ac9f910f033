"""Comparison of test_parity: an HF reference computed in one process, and what each rank of a layout gets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.batch import PackedBatch
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.resolved import Layout
from slime_like.metrics.types import reduce_metrics
from tests.train.faults import FAULTS, replaced
from tests.train.jobs import Results, Shared, make_actor
from tests.train.models import VOCAB, count_tokens, joined, make_rows, normalised
from tests.train.ranks import World

TEMPERATURE = 0.7
ENTROPY = 0.05
ALGO = GrpoConfig(entropy_coef=ENTROPY)
DECAYS = ("A_log", "dt_bias")


def batch() -> list[PackedBatch]:
    """Four ragged micro-batches of unequal weight: one sequence, many, a very short one."""
    lengths = [(23, 9, 14), (31,), (5, 2, 8, 6, 11), (17, 12)]
    return normalised([make_rows(row, seed) for seed, row in enumerate(lengths)])


def pairs(rows: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The same in half as many micro-batches: what a collective carries costs little, each costs its latency."""
    return [joined(first, second) for first, second in itertools.batched(rows, 2)]


@dataclasses.dataclass(frozen=True)
class Reference:
    """One optimizer step's worth of gradients by transformers, sequence by sequence, without packing."""

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    logprobs: list[np.ndarray]  # [T] per micro-batch
    logits: np.ndarray  # [T, V] of the first micro-batch
    balance: float = 0.0  # auxiliary loss of the routers before its coefficient, mean over the layers
    load: float = 0.0  # of a layer's busiest expert over the mean, mean over the layers

    @property
    def pairs(self) -> list[np.ndarray]:
        """[T] per micro-batch of ``pairs(batch())``."""
        return [np.concatenate(two) for two in itertools.batched(self.logprobs, 2)]


def reference(folder: Path, coefficient: float = 0.0) -> Reference:
    """HF's loss and gradients of ``batch()``; to the gradients the routers' auxiliary loss adds with ``coefficient``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    total = torch.zeros(())
    columns: list[np.ndarray] = []
    logits: list[np.ndarray] = []  # [T, V] per sequence
    routed: list[list[tuple[Tensor, ...]]] = []  # per micro-batch and sequence the logits [T, E] of each router
    for rows in batch():
        routed.append([])
        column = np.zeros(len(rows.token_ids), np.float32)
        for s, (start, stop) in enumerate(zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True)):
            ids = torch.from_numpy(rows.token_ids[start:stop].astype(np.int64))[None]
            with without_fla(model):
                out = model(input_ids=ids, **({"output_router_logits": True} if coefficient else {}))
            routed[-1] += [out.router_logits] if coefficient else []
            logits.append(out.logits[0].detach().float().numpy())
            log_p = torch.log_softmax(out.logits[0, :-1].float() / TEMPERATURE, -1)
            logprobs = log_p.gather(1, ids[0, 1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            assert rows.advantages is not None
            losses = -(logprobs - logprobs.detach()).exp() * float(rows.advantages[s]) - ENTROPY * entropy
            total = total + (torch.from_numpy(rows.loss_weight[start + 1 : stop]) * losses).sum()
            column[start + 1 : stop] = logprobs.detach().numpy()
        columns.append(column)
    balance, load = _balance(routed, model.config.num_experts_per_tok) if coefficient else (total.new_zeros(1), 0.0)
    (total + coefficient * balance.sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten().double() for g in grads.values()]).norm()
    means = float(balance.detach().mean()), load
    first = np.concatenate(logits[: len(batch()[0].cu_seqlens) - 1])
    return Reference(float(total.detach()), float(norm), by_expert(grads), columns, first, *means)


def _balance(routed: list[list[tuple[Tensor, ...]]], top: int) -> tuple[Tensor, float]:
    """Per layer the mean over tokens of each micro-batch's auxiliary loss (Switch Transformer, eq. 4), and the load."""
    layers: list[Tensor] = []
    loads: list[float] = []
    for layer in range(len(routed[0][0])):
        scores = [torch.softmax(torch.cat([s[layer] for s in micro]), -1) for micro in routed]
        chosen = [torch.zeros_like(p).scatter(1, p.topk(top, -1).indices, 1.0) for p in scores]
        losses = [
            p.shape[1] * (c.mean(0) / top * p.mean(0)).sum() * len(p) for p, c in zip(scores, chosen, strict=True)
        ]
        layers.append(torch.stack(losses).sum() / sum(map(len, scores)))
        counts = torch.cat(chosen).sum(0)
        loads.append(float(counts.max() / counts.mean()))
    return torch.stack(layers), float(np.mean(loads))


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors over all experts as transformers saves them: matrices of each expert."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, fused, part = name.partition("mlp.experts.")
        if part not in ("gate_up_proj", "down_proj"):  # no expert's, or one expert's
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            out |= {f"{before}{fused}{e}.{n}.weight": p for n, p in zip(names, parts, strict=True)}
    return out


@contextlib.contextmanager
def without_fla(model: Any) -> Generator[None]:
    """transformers' own functions for Gated DeltaNet: where fla is installed it would call that, also with CPU tensors."""
    module = importlib.import_module(type(model).__module__)
    names = [name for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn") if hasattr(module, name)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replaced(module, name, inspect.unwrap(getattr(module, name))))
        yield


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
    balance: float = 0.0  # of the auxiliary loss and the load of experts, as they are reported
    logits: float | None = None  # of a micro-batch's, whole [T, V], relative to the largest; on one rank alone

    @property
    def worst(self) -> float:
        """The number that has a bound."""
        return max(self.loss, self.grad_norm, self.grad)


def comparison(results: Results, name: str) -> Comparison:
    """Return the result of a job of ``compare``: exactly one of its ranks reports."""
    (found,) = [result for result in results[name] if result is not None]
    assert isinstance(found, Comparison)
    return found


def compare(
    world: World, shared: Shared, kind: str, layout: Layout, model: dict[str, Any], fault: str | None
) -> Comparison | None:
    """Train one step in ``layout`` and compare with HF. The comparison on the reporter, None elsewhere."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return _compare(world, shared, kind, layout, model)


def _compare(world: World, shared: Shared, kind: str, layout: Layout, model: dict[str, Any]) -> Comparison | None:
    ref: Reference = shared.references[kind]
    actor = make_actor(world, shared.models[kind], layout, algo=ALGO, temperature=TEMPERATURE, model=model)
    rows = batch()
    mine = rows[actor.rank_info.dp_rank :: layout.dp]
    if layout.vpp > 1 and layout.dp == 1:  # an odd number, which the interleaved schedule does not take as it is
        mine = [joined(mine[0], mine[1]), *mine[2:]]
    count = count_tokens(rows)
    scores = [actor.score(r) for r in pairs(rows)]
    logits = _logits_error(actor, rows[0], ref) if layout.world_size == 1 else None
    errors: dict[str, float] = {}
    update = actor.optimizer.step

    def compared() -> Any:
        errors.update(gradient_errors(actor, ref.grads))  # those that the step is about to take
        return update()

    with replaced(actor.optimizer, "step", compared):
        metrics = reduce_metrics(actor.step([mine], [count]))
    if not actor.rank_info.is_reporter:
        return None
    score = max(float(np.abs(s - e).max()) for s, e in zip(scores, ref.pairs, strict=True) if s is not None)
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
        balance=_balance_error(metrics, ref) if ref.balance else 0.0,
        logits=logits,
    )


def _logits_error(actor: Any, rows: PackedBatch, ref: Reference) -> float:
    found = logits_of(actor, rows)
    assert found.shape == ref.logits.shape
    return float(np.abs(found - ref.logits).max() / np.abs(ref.logits).max())


def logits_of(actor: Any, rows: PackedBatch) -> Any:
    """[T, V] of the tokens in ``rows``, before the temperature, on the last pipeline stage."""
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    from slime_like.train.megatron.model.forward import make_micro, run_schedule

    policy = actor.model.last

    def after(micro: Any, hidden: Tensor, non_loss_data: bool = True) -> Any:
        if policy.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        tied = policy.share_embeddings_and_output_weights
        weight: Any = policy.shared_embedding_or_output_weight() if tied else policy.output_layer.weight
        whole: Any = gather_from_tensor_model_parallel_region(hidden[: len(rows.token_ids), 0] @ weight.T)
        return whole[:, :VOCAB].numpy()

    with torch.no_grad():
        found = run_schedule(actor.wrapped, [make_micro(rows, actor.rank_info)], after, train=False)
    return found[0] if found else None


def _balance_error(metrics: dict[str, float], ref: Reference) -> float:
    assert metrics["train/moe_load_max"] >= metrics["train/moe_load"] >= 1
    return max(abs(metrics["train/moe_aux_loss"] / ref.balance - 1), abs(metrics["train/moe_load"] / ref.load - 1))


def gradient_errors(trainer: Any, grads: dict[str, Tensor]) -> dict[str, float]:
    """Parameter key -> largest error of any rank's reduced gradient over the maximum of the whole HF tensor."""
    from slime_like.train.megatron.model.model import named_weights

    rank_info = trainer.rank_info
    if rank_info.layout.distributed_optimizer:
        _gather_gradients(trainer.wrapped)
    errors: dict[str, float] = {}
    for key, parameter in named_weights(trainer.model):
        weight = trainer.table[key]
        whole = [grads[name.replace("model.language_model.", "model.")] for name in weight.names]
        expected = weight.split(whole, rank_info.layout.tp, rank_info.tp_rank)
        top = max(float(g.abs().max()) for g in whole)
        found: Any = parameter
        errors[key] = float((found.main_grad.float() - expected).abs().max()) / top
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, errors)
    return {key: max(e[key] for e in everyone if key in e) for key in {k for e in everyone for k in e}}


def _gather_gradients(wrapped: Any) -> None:
    """The distributed optimizer reduces only a shard of each bucket to a rank: put the shards together."""
    for group in [group for chunk in wrapped for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_single(bucket.grad_data, mine, group=ranks)
