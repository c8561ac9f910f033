"""Comparison of the ranks of a layout with an HF reference that is computed in one process."""

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
from slime_like.data.routing import ROUTED_EXPERTS
from slime_like.metrics.types import reduce_metrics
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.faults import FAULTS, replace_attribute
from tests.train.jobs import Results, Shared, make_actor
from tests.train.models import NUM_BLOCKS, NUM_EXPERTS, VOCAB, count_tokens, join_rows, make_rows, normalise
from tests.train.ranks import RankWorld
from tests.values import has_values

TEMPERATURE = 0.7
ENTROPY = 0.05
ALGO = GrpoConfig(entropy_coef=ENTROPY)
DECAYS = ("A_log", "dt_bias")
REPLAYED = "qwen3_moe replayed"  # kind whose batch has the experts of an engine


def batch(kind: str = "") -> list[PackedBatch]:
    """Return four ragged micro-batches of unequal weight, with three, one, five and two sequences.

    For the kind ``REPLAYED``, they contain routed experts.
    """
    lengths = [(23, 9, 14), (31,), (5, 2, 8, 6, 11), (17, 12)]
    micro_batches = normalise([make_rows(row, seed) for seed, row in enumerate(lengths)])
    return [routed(row, seed) for seed, row in enumerate(micro_batches)] if kind == REPLAYED else micro_batches


def routed(row: PackedBatch, seed: int) -> PackedBatch:
    """Return ``row`` with two random experts per token and block.

    Both are 0, which means none, for the last token of each sequence and a tenth of all tokens.
    """
    rng, total = np.random.default_rng(seed), len(row.token_ids)
    experts = rng.random((total, NUM_BLOCKS, NUM_EXPERTS)).argsort(-1)[..., :2].astype(np.uint8)
    experts[row.cu_seqlens[1:] - 1] = 0
    experts[rng.random(total) < 0.1] = 0
    return dataclasses.replace(row, extras={ROUTED_EXPERTS: experts})


def pairs(micro_batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """Return the rows in half as many micro-batches, which need fewer collectives and so less time."""
    return [join_rows(first, second) for first, second in itertools.batched(micro_batches, 2)]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Loss and gradients of one optimizer step by transformers, sequence by sequence without packing."""

    loss: float
    grad_norm: float
    grads: dict[str, Tensor]
    logprobs: list[np.ndarray]  # [T] per micro-batch
    logits: np.ndarray  # [T, V] of the first micro-batch
    balance: float = 0.0  # auxiliary loss of the routers without its coefficient, mean over the layers
    load: float = 0.0  # load of a layer's busiest expert over the mean load, mean over the layers

    @property
    def pairs(self) -> list[np.ndarray]:
        """Log-probabilities [T] of each micro-batch of ``pairs(batch())``."""
        return [np.concatenate(two) for two in itertools.batched(self.logprobs, 2)]


def reference(folder: Path, coefficient: float = 0.0, kind: str = "") -> Reference:
    """Return what transformers computes for ``batch(kind)`` with the model in ``folder``.

    The gradients, but not ``loss``, include ``coefficient`` times the auxiliary loss. If it is 0, ``balance`` and
    ``load`` are 0.
    """
    from transformers import AutoModelForCausalLM

    config = HFFolder(folder).config()
    config.model_type = type(config).model_type  # by which transformers converts names of tensors
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="sdpa")
    total = torch.zeros(())
    columns: list[np.ndarray] = []
    logits: list[np.ndarray] = []  # [T, V] per sequence
    router_logits: list[list[tuple[Tensor, ...]]] = []  # [micro-batch][sequence][layer] -> [T, E]
    for micro_batch in batch(kind):
        router_logits.append([])
        column = np.zeros(len(micro_batch.token_ids), np.float32)
        for s, (start, stop) in enumerate(zip(micro_batch.cu_seqlens[:-1], micro_batch.cu_seqlens[1:], strict=True)):
            ids = torch.from_numpy(micro_batch.token_ids[start:stop].astype(np.int64))[None]
            experts = {name: column[start:stop] for name, column in micro_batch.extras.items()}
            with without_fla(model), choosing(model, **experts):
                out = model(input_ids=ids, **({"output_router_logits": True} if coefficient else {}))
            router_logits[-1] += [out.router_logits] if coefficient else []
            logits.append(out.logits[0].detach().float().numpy())
            log_p = torch.log_softmax(out.logits[0, :-1].float() / TEMPERATURE, -1)
            logprobs = log_p.gather(1, ids[0, 1:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            assert micro_batch.advantages is not None
            losses = -(logprobs - logprobs.detach()).exp() * float(micro_batch.advantages[s]) - ENTROPY * entropy
            total = total + (torch.from_numpy(micro_batch.loss_weight[start + 1 : stop]) * losses).sum()
            column[start + 1 : stop] = logprobs.detach().numpy()
        columns.append(column)
    balance, load = (
        _balance(router_logits, model.config.num_experts_per_tok) if coefficient else (total.new_zeros(1), 0.0)
    )
    (total + coefficient * balance.sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.cat([g.flatten().double() for g in grads.values()]).norm()
    means = float(balance.detach().mean()), load
    first = np.concatenate(logits[: len(batch()[0].cu_seqlens) - 1])
    return Reference(
        float(total.detach()), float(norm), by_expert(as_saved(grads, config.model_type)), columns, first, *means
    )


def _balance(router_logits: list[list[tuple[Tensor, ...]]], top: int) -> tuple[Tensor, float]:
    """Return the auxiliary loss of each layer (Switch Transformer, eq. 4), and ``Reference.load``.

    The loss of a layer is the mean over micro-batches, weighted by their tokens.
    """
    layers: list[Tensor] = []
    loads: list[float] = []
    for layer in range(len(router_logits[0][0])):
        scores = [torch.softmax(torch.cat([s[layer] for s in micro]), -1) for micro in router_logits]
        choices = [torch.zeros_like(p).scatter(1, p.topk(top, -1).indices, 1.0) for p in scores]
        losses = [
            p.shape[1] * (c.mean(0) / top * p.mean(0)).sum() * len(p) for p, c in zip(scores, choices, strict=True)
        ]
        layers.append(torch.stack(losses).sum() / sum(map(len, scores)))
        counts = torch.cat(choices).sum(0)
        loads.append(float(counts.max() / counts.mean()))
    return torch.stack(layers), float(np.mean(loads))


def as_saved(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Return ``tensors`` with the names that transformers gives them when it saves a model.

    They differ only for MiniMax-M2, whose router and experts are renamed and whose fused experts are split. For other
    models, return ``tensors`` itself.
    """
    if model_type != "minimax_m2":
        return tensors
    new = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}
    out: dict[str, Tensor] = {}
    for name, tensor in by_expert(tensors).items():
        for before, after in new.items():
            name = name.replace(before, after)
        out[name] = tensor
    return out


def by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` with fused experts split into three matrices per expert, as transformers saves them."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, fused, part = name.partition("mlp.experts.")
        if part not in ("gate_up_proj", "down_proj"):  # not a fused tensor
            out[name] = tensor
            continue
        for e, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            out |= {f"{before}{fused}{e}.{n}.weight": p for n, p in zip(names, parts, strict=True)}
    return out


@contextlib.contextmanager
def choosing(model: Any, routed_experts: Any = None) -> Generator[None]:
    """Make transformers' Qwen3-MoE use ``routed_experts`` [T, B, 2] for T tokens, except where both experts are 0."""

    def replay(block: int) -> Any:
        def hook(gate: Any, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, _, own = outputs
            engine_ids = torch.from_numpy(routed_experts[:, block].astype(np.int64))
            indices = torch.where(engine_ids[:, :1] != engine_ids[:, 1:], engine_ids, own)
            weights = torch.softmax(logits.float(), -1).gather(1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        return hook

    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [] if routed_experts is None else [gate.register_forward_hook(replay(b)) for b, gate in enumerate(gates)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def without_fla(model: Any) -> Generator[None]:
    """Make transformers, which calls an installed fla even for CPU tensors, use its own Gated DeltaNet functions."""
    module = importlib.import_module(type(model).__module__)
    names = [name for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn") if hasattr(module, name)]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(replace_attribute(module, name, inspect.unwrap(getattr(module, name))))
        yield


@dataclasses.dataclass(frozen=True)
class RelativeErrors:
    """Largest relative errors over all ranks. A gradient's error is relative to the maximum of its full tensor.

    The gradient of a decay is a sum over all tokens whose terms almost cancel, so its rounding errors are the largest.
    """

    loss: float
    grad_norm: float
    grad: float
    worst_grad: str
    score: float  # absolute
    decay: float = 0.0  # as ``grad``, of the decays of Gated DeltaNet layers
    balance: float = 0.0  # error of the reported auxiliary loss and load of experts
    logits: float | None = None  # relative error of a micro-batch's logits [T, V]; None if the world has several ranks

    @property
    def worst(self) -> float:
        """Largest error among loss, gradient norm and gradients."""
        return max(self.loss, self.grad_norm, self.grad)


def comparison(results: Results, name: str) -> RelativeErrors:
    """Return the result of a job of ``compare``, which exactly one rank reports."""
    (relative_errors,) = [result for result in results[name] if result is not None]
    assert isinstance(relative_errors, RelativeErrors)
    return relative_errors


def assert_equals_hf(errors: RelativeErrors, bound: float) -> None:
    """Assert that loss, gradients, scores and (if compared) logits differ from HF's by at most ``bound``."""
    assert errors.worst <= bound, errors
    assert errors.score <= bound, errors
    assert errors.logits is None or errors.logits <= bound, errors


def compare(
    world: RankWorld, shared: Shared, kind: str, layout: Layout, model: dict[str, Any], fault: str | None
) -> RelativeErrors | None:
    """Compare one optimizer step in ``layout`` with HF. Return the errors on the reporter, None elsewhere."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return _compare(world, shared, kind, layout, model)


def _compare(
    world: RankWorld, shared: Shared, kind: str, layout: Layout, model: dict[str, Any]
) -> RelativeErrors | None:
    ref: Reference = shared.references[kind]
    algo = dataclasses.replace(ALGO, routing_replay="rollout") if kind == REPLAYED else ALGO
    actor = make_actor(world, shared.models[kind], layout, algo=algo, temperature=TEMPERATURE, model=model)
    micro_batches = batch(kind)
    shard = shard_of(micro_batches, layout, actor.rank_info.dp_rank, join=not ref.balance)
    count = count_tokens(micro_batches)
    scores = actor.score(join_rows(*pairs(micro_batches)))
    logits = _logits_error(actor, micro_batches[0], ref) if layout.world_size == 1 else None
    errors: dict[str, float] = {}
    update = actor.optimizer.step

    def compared() -> Any:
        errors.update(gradient_errors(actor, ref.grads))  # the gradients of this optimizer step
        return update()

    with replace_attribute(actor.optimizer, "step", compared):
        metrics = reduce_metrics(actor.train_rollout([shard], [count]))
    if not actor.rank_info.is_reporter:
        return None
    decays = [error for name, error in errors.items() if name.endswith(DECAYS)]
    errors = {name: error for name, error in errors.items() if not name.endswith(DECAYS)}
    worst = max(errors, key=lambda name: errors[name])
    return RelativeErrors(
        loss=abs(metrics["train/loss"] / ref.loss - 1),
        grad_norm=abs(metrics["train/grad_norm"] / ref.grad_norm - 1),
        grad=errors[worst],
        worst_grad=worst,
        score=float(np.abs(scores - np.concatenate(ref.logprobs)).max()),
        decay=max(decays, default=0.0),
        balance=_balance_error(metrics, ref) if ref.balance else 0.0,
        logits=logits,
    )


def shard_of(micro_batches: list[PackedBatch], layout: Layout, dp_rank: int, *, join: bool) -> list[PackedBatch]:
    """Return the micro-batches of a rank. With ``join``, they are joined into fewer, which need fewer collectives.

    A single rank has four. A pipeline has three: an odd number, which the interleaved schedule pads. The second, which
    has one sequence, is never joined, because kernels may treat such a packed row in another way.
    """
    if layout.dp > 1 or layout.world_size == 1 or not join:
        return micro_batches[dp_rank :: layout.dp]
    first, second, third, fourth = micro_batches
    if layout.pp > 1:
        return [first, second, join_rows(third, fourth)]
    return [join_rows(join_rows(first, third), fourth), second]


def _logits_error(actor: Any, micro_batch: PackedBatch, ref: Reference) -> float:
    logits = logits_of(actor, micro_batch)
    assert logits.shape == ref.logits.shape
    return float(np.abs(logits - ref.logits).max() / np.abs(ref.logits).max())


def logits_of(actor: Any, micro_batch: PackedBatch) -> Any:
    """Return the logits [T, V] of ``micro_batch`` at temperature 1 on the last pipeline stage, None elsewhere."""
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
        logits_TV: Any = gather_from_tensor_model_parallel_region(hidden[: len(micro_batch.token_ids), 0] @ weight.T)
        return logits_TV[:, :VOCAB].numpy()

    with torch.no_grad():
        logits = run_schedule(actor.wrapped, [make_micro(micro_batch, actor.rank_info)], after, train=False)
    return logits[0] if logits else None


def _balance_error(metrics: dict[str, float], ref: Reference) -> float:
    assert metrics["train/moe_load_max"] >= metrics["train/moe_load"] >= 1
    return max(abs(metrics["train/moe_aux_loss"] / ref.balance - 1), abs(metrics["train/moe_load"] / ref.load - 1))


def gradient_errors(trainer: Any, grads: dict[str, Tensor]) -> dict[str, float]:
    """Return a dict from the key of each parameter to the largest error of its gradient on any rank. Collective.

    The gradients are reduced. An error is divided by the largest absolute value of the full gradient. ``grads``: HF
    name -> full gradient.
    """
    from slime_like.train.megatron.model.model import named_weights

    rank_info = trainer.rank_info
    if rank_info.layout.distributed_optimizer:
        _gather_gradients(trainer.wrapped)
    errors: dict[str, float] = {}
    for key, parameter in named_weights(trainer.model):
        if not isinstance(parameter, torch.nn.Parameter):
            continue  # a bias of a router
        weight = trainer.table[key]
        full_grads = [grads[name.replace("model.language_model.", "model.")] for name in weight.names]
        expected = weight.split(full_grads, *rank_info.shard(expert=weight.is_expert))
        top = max(float(g.abs().max()) for g in full_grads)
        typed_parameter: Any = parameter
        error = float((typed_parameter.main_grad.float() - expected).abs().max())
        errors[key] = error / top if has_values() else error
    errors_of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors_of_ranks, errors)
    return {key: max(e[key] for e in errors_of_ranks if key in e) for key in {k for e in errors_of_ranks for k in e}}


def _gather_gradients(wrapped: Any) -> None:
    """Gather the gradient shards, because the distributed optimizer reduces only one shard of each bucket on a rank."""
    for group in [group for chunk in wrapped for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            shard = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_single(bucket.grad_data, shard, group=ranks)
