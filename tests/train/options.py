"""Rank functions of test_options: recompute, overlap, bfloat16, schedules, AdamW, optimizer offload and kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.model import OptimConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from slime_like.metrics.types import reduce_metrics
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, annotated, make_actor, save_checkpoint
from tests.train.lifecycle import batch, digest, four_micro_batches, train
from tests.train.models import count_tokens
from tests.train.parity import ALGO, TEMPERATURE, gradient_errors, pairs
from tests.train.parity import batch as parity_batch
from tests.train.ranks import RankWorld


# ---- recompute -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Recomputed:
    """Largest relative gradient error of an optimizer step with recompute, and its forward calls per layer part."""

    error: float
    calls: dict[str, int]


def recompute(
    world: RankWorld, shared: Shared, layout: Layout, variants: dict[str, dict[str, Any]], kernels: str
) -> dict[str, Recomputed]:
    """Compare this rank's gradients of one optimizer step under each variant with the gradients without recompute."""
    expected: dict[str, Tensor] | None = None
    out: dict[str, Recomputed] = {}
    for name, model in {"none": {}, **variants}.items():
        actor = make_actor(world, shared.models["tied"], layout, algo=ALGO, model={"cpu_kernels": kernels, **model})
        with _count_calls() as calls:
            grads = gradients(actor)
        expected = expected or grads
        errors = [float((grads[key] - expected[key]).abs().max() / expected[key].abs().max()) for key in expected]
        out[name] = Recomputed(max(errors), calls)
    return out


def gradients(actor: Any) -> dict[str, Tensor]:
    """Return this rank's reduced gradients of one optimizer step."""
    from slime_like.train.megatron.model.model import named_weights

    micro_batches = pairs(parity_batch())[actor.rank_info.dp_rank :: actor.rank_info.layout.dp]
    actor.optimizer_step.backward(annotated(actor, micro_batches), count_tokens(parity_batch()), None)
    return {key: p.main_grad.clone() for key, p in named_weights(actor.model)}  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def _count_calls() -> Generator[dict[str, int]]:
    """Yield the number of forward calls per part of a layer, counted until exit."""
    from megatron.core.transformer.mlp import MLP

    from slime_like.train.megatron.model.layers import PackedAttention, RMSNorm

    calls: dict[str, int] = {}

    def counting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return stock(*args, **kwargs)

        return forward

    with contextlib.ExitStack() as stack:
        for name, part in (("core_attn", PackedAttention), ("mlp", MLP), ("layernorm", RMSNorm)):
            stack.enter_context(replace_attribute(part, "forward", counting(name, part.forward)))
        yield calls


# ---- overlap ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Overlapped:
    """Weights and scores after two rollouts of two optimizer steps, and the communication that overlapped."""

    weights: list[str]  # after each rollout
    score: Any
    buckets: int
    num_early: int  # buckets whose reduction started before backward ended
    gathered_at_read: list[bool]  # at each read of the output layer's weight


OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5_000}


def overlap(world: RankWorld, shared: Shared, kind: str, layout: Layout, fault: str | None) -> Overlapped:
    """Train two rollouts of two optimizer steps each in ``layout``."""
    from slime_like.train.megatron.rank import trainer as trainer_module

    # No clipping, because the last bit of the norm depends on the division of the sum over ranks.
    actor = make_actor(world, shared.models[kind], layout, steps_per_rollout=2, optim={"clip_grad": 0.0})
    chunks: list[Any] = list(actor.wrapped)
    wrapped: Any = chunks[-1]
    early_reductions: list[bool] = []
    for group in (group for chunk in chunks for group in chunk.bucket_groups):
        stock = group.register_grad_ready

        def ready(*args: Any, group: Any = group, stock: Any = stock, **kwargs: Any) -> None:
            stock(*args, **kwargs)
            if group.is_last_microbatch and group.grad_reduce_handle is not None:
                early_reductions.append(True)

        group.register_grad_ready = ready
    gathered_at_read: list[bool] = []

    def read_weight(hidden: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = wrapped.param_to_bucket_group[weight]
        gathered_at_read.append(group.param_gather_dispatched and group.param_gather_handle is None)
        return stock_scores(hidden, weight, *args, **kwargs)

    weights: list[str] = []
    stock_scores = actor.model.last.vocab_scores
    with contextlib.ExitStack() as stack:
        if fault == "weights are read early":
            stack.enter_context(replace_attribute(trainer_module.optim, "gather_parameters", lambda wrapped: None))
        if fault == "output layer does not wait":
            wrapped.remove_forward_pre_hook_handles[actor.model.last.output_layer].remove()
            stack.enter_context(
                contextlib.suppress(AssertionError)
            )  # raised by megatron at the next gather of that bucket
        if layout.overlap_param_gather:
            stack.enter_context(replace_attribute(actor.model.last, "vocab_scores", read_weight))
        for seed in (1, 2):
            train(actor, layout, 2 * seed, steps=2, make=four_micro_batches)
            weights.append(digest(actor))
    score = actor.score(batch(9)[0]) if len(weights) == 2 else None
    return Overlapped(
        weights, score, sum(len(chunk.bucket_groups) for chunk in chunks), len(early_reductions), gathered_at_read
    )


# ---- bfloat16 --------------------------------------------------------------------------------------------------------
HALF: dict[str, Any] = {"dtype": "bfloat16", "algo": ALGO, "temperature": TEMPERATURE}


@dataclasses.dataclass(frozen=True)
class Rounded:
    """Errors of a bfloat16 model against the float32 reference.

    The largest relative gradient error of any rank and, on the reporter, mean and largest log-probability difference.
    """

    grad: float
    score: tuple[float, float] | None


def near(
    world: RankWorld, shared: Shared, layout: Layout, kind: str = "tied", model: dict[str, Any] | None = None
) -> Rounded:
    """Compare gradients and scores of a bfloat16 model with the reference."""

    ref = shared.references[kind]
    actor = make_actor(world, shared.models[kind], layout, **HALF, model=model or {})
    micro_batches = pairs(parity_batch())
    scores = [actor.score(r) for r in micro_batches]
    micros = annotated(actor, micro_batches[actor.rank_info.dp_rank :: layout.dp])
    actor.optimizer_step.backward(micros, count_tokens(micro_batches), None)
    grad = max(gradient_errors(actor, ref.grads).values())
    if not actor.rank_info.is_reporter:
        return Rounded(grad, None)
    errors = np.concatenate([np.abs(s - e) for s, e in zip(scores, ref.pairs, strict=True)])  # pyright: ignore[reportOptionalOperand]
    return Rounded(grad, (float(errors.mean()), float(errors.max())))


def bfloat16(world: RankWorld, shared: Shared, layout: Layout, kind: str = "tied") -> dict[str, Any]:
    """Return dtypes of a bfloat16 model, the change of its float32 main weights, and whether a resume restores them."""
    from slime_like.train.megatron.model.model import named_weights

    out: dict[str, Any] = {}
    tiny = make_actor(world, shared.models[kind], layout, **HALF, optim={"lr": 1e-6, "weight_decay": 0.0})
    out["dtypes"] = {(str(p.dtype), str(p.main_grad.dtype)) for _, p in named_weights(tiny.model)}  # pyright: ignore[reportAttributeAccessIssue]
    out["sent"] = {m.dtype for m in tiny.hf_export.manifest()}
    main_before = _main_weights(tiny)
    for seed in range(3):
        train(tiny, layout, seed)
    main = _main_weights(tiny)
    out["main dtypes"] = {str(p.dtype) for p in main}
    distances = torch.cat([(a - b).abs().flatten() for a, b in zip(main, main_before, strict=True)])
    out["main weights moved"] = float(distances.max())
    save_checkpoint(tiny, shared.scratch, 3)
    resumed = make_actor(world, shared.models[kind], layout, **HALF)
    resumed.load(shared.scratch)
    out["resumed exactly"] = all(torch.equal(a, b) for a, b in zip(main, _main_weights(resumed), strict=True))
    return out


def _main_weights(actor: Any) -> list[Tensor]:
    """Return copies of this rank's main weights, which the optimizer updates."""
    return [p.detach().clone() for group in actor.optimizer.param_groups for p in group["params"]]


# ---- schedules -------------------------------------------------------------------------------------------------------
def schedules(
    world: RankWorld, shared: Shared, cases: dict[str, dict[str, Any]], num_steps: int
) -> dict[str, list[float]]:
    """Return the learning rate of every optimizer step for each schedule."""
    from slime_like.train.megatron.step.optim import make_schedule

    actor = make_actor(world, shared.models["tied"], Layout())
    optimizer, out = actor.optimizer, dict[str, list[float]]()
    for name, keys in cases.items():
        for group in optimizer.param_groups:
            group["max_lr"], group["min_lr"] = keys["lr"], keys.get("min_lr", 0.0)
        spec = dataclasses.replace(actor.spec, optim=OptimConfig(**keys), num_steps=num_steps)
        schedule = make_schedule(spec, optimizer)
        rates: list[float] = []
        for _ in range(num_steps):
            schedule.step(1)
            rates.append(float(optimizer.param_groups[0]["lr"]))
        out[name] = rates
    return out


# ---- AdamW -----------------------------------------------------------------------------------------------------------
ADAMW: dict[str, Any] = {
    "lr": 0.01,
    "min_lr": 0.001,
    "schedule": "linear",
    "warmup_steps": 1,
    "beta1": 0.8,
    "beta2": 0.9,
    "eps": 1e-3,
    "weight_decay": 0.3,
    "clip_grad": 0.05,
}


def adamw(world: RankWorld, shared: Shared) -> dict[str, float]:
    """Return the largest errors of four optimizer steps of a model with biases against AdamW in float64."""
    from slime_like.train.megatron.model.model import named_weights

    actor = make_actor(world, shared.models["qwen2"], Layout(), optim=ADAMW, num_steps=4, algo=SftConfig())
    weights = {key: p.detach().double() for key, p in named_weights(actor.model)}
    moments = {key: (torch.zeros_like(w), torch.zeros_like(w)) for key, w in weights.items()}
    out = {"norm": 0.0, "largest norm": 0.0, "rate": 0.0}
    for t in range(1, 5):
        micro_batches = batch(t)
        micros = [actor.lay_out(r) for r in micro_batches]
        grads: dict[str, Tensor] = {}

        def step(update: Any = actor.optimizer.step, grads: dict[str, Tensor] = grads) -> Any:
            grads |= {key: p.main_grad.double() for key, p in named_weights(actor.model)}  # pyright: ignore[reportAttributeAccessIssue]
            return update()  # clips the gradients in place

        with replace_attribute(actor.optimizer, "step", step):
            metrics = reduce_metrics(actor.optimizer_step(micros, count_tokens(micro_batches), None))
        norm = _adamw_float64(weights, moments, grads, t)
        out["norm"] = max(out["norm"], abs(metrics["train/grad_norm"] / norm - 1))
        out["rate"] = max(out["rate"], abs(metrics["train/lr"] / _rate(t) - 1))
        out["largest norm"] = max(out["largest norm"], norm)
    weights_after = {key: p.detach().double() for key, p in named_weights(actor.model)}
    for kind, ndim in (("vectors", 1), ("matrices", 2)):
        out[kind] = max(float((weights_after[key] - w).abs().max()) for key, w in weights.items() if w.ndim == ndim)
    return out


def _rate(t: int) -> float:
    """Return the learning rate of optimizer step ``t`` (from 1): one warmup step, then linear decay until step 4."""
    return ADAMW["min_lr"] + (ADAMW["lr"] - ADAMW["min_lr"]) * (1 - (t - 1) / 3)


def _adamw_float64(
    weights: dict[str, Tensor], moments: dict[str, tuple[Tensor, Tensor]], grads: dict[str, Tensor], t: int
) -> float:
    """Clip, and take one AdamW step (https://arxiv.org/abs/1711.05101) in place. Return the norm before clipping."""
    cfg = ADAMW
    rate = _rate(t)
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    scale = min(1.0, cfg["clip_grad"] / (norm + 1e-6))
    for key, w in weights.items():
        g, (m, v) = grads[key] * scale, moments[key]
        m.mul_(cfg["beta1"]).add_((1 - cfg["beta1"]) * g)
        v.mul_(cfg["beta2"]).add_((1 - cfg["beta2"]) * g**2)
        if w.ndim > 1:  # norms and biases do not decay
            w.mul_(1 - rate * cfg["weight_decay"])
        denominator = (v / (1 - cfg["beta2"] ** t)).sqrt() + cfg["eps"]
        w.sub_(rate * (m / (1 - cfg["beta1"] ** t)) / denominator)
    return norm


# ---- optimizer offload -----------------------------------------------------------------------------------------------
def offload(world: RankWorld, shared: Shared, layout: Layout, fraction: float) -> dict[str, Any]:
    """Compare a bfloat16 run, its optimizer divided as by offload, with an undivided run and with its resumed run."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    spec: dict[str, Any] = {"dtype": "bfloat16", "algo": SftConfig(), "optim": {"lr": 1e-3, "weight_decay": 0.1}}
    plain = make_actor(world, shared.models["qwen2"], layout, **spec)
    for seed in range(5):
        train(plain, layout, seed)
    with pretended_offload(fraction):
        divided = make_actor(world, shared.models["qwen2"], layout, **spec)
        for seed in range(3):
            train(divided, layout, seed)
        save_checkpoint(divided, shared.scratch, 3)
        resumed = make_actor(world, shared.models["qwen2"], layout, **spec)
        resumed.load(shared.scratch)
        is_restored = digest(resumed) == digest(divided)
        for actor in (divided, resumed):
            for seed in (3, 4):
                train(actor, layout, seed)
    inner = [chained.optimizer for chained in divided.optimizer.chained_optimizers]
    assert all(isinstance(chained, HybridDeviceOptimizer) for chained in inner)
    return {
        "host": sum(len(chained.cpu_optimizers) for chained in inner),
        "device": sum(
            len(g["params"]) for chained in inner if chained.gpu_optimizer for g in chained.gpu_optimizer.param_groups
        ),
        "equal": digest(divided) == digest(plain),
        "restored": is_restored,
        "resumed": digest(resumed) == digest(divided),
    }


@contextlib.contextmanager
def pretended_offload(fraction: float) -> Generator[None]:
    """Run megatron's offload without a GPU, with the parameters that are not offloaded treated as the GPU part."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from slime_like.train.megatron.step import optim

    def divide(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        on_host, on_device, copies, originals, masters = [], [], {}, {}, {}
        numel = sum(p.numel() for group in self.param_groups for p in group["params"])
        num_offloaded = 0
        for group in self.param_groups:
            halves: tuple[list[Tensor], list[Tensor]] = ([], [])
            for p in group["params"]:
                offloaded = num_offloaded < numel * offload_fraction
                master = masters[p] = p.detach().clone().float()
                if offloaded:
                    num_offloaded += p.numel()
                    copies[p], originals[master] = master, p
                halves[0 if offloaded else 1].append(master)
            for param_groups, params in zip((on_host, on_device), halves, strict=True):
                if params:
                    param_groups.append({**group, "params": params})
        return on_host, on_device, copies, originals, masters

    with (
        replace_attribute(optim, "_offload", lambda spec: optim.offload_fields(fraction)),
        replace_attribute(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divide),
        replace_attribute(HybridDeviceOptimizer, "_move_new_state_to_right_device", lambda self: None),
    ):
        yield


# ---- kernels ---------------------------------------------------------------------------------------------------------
def cpu_kernels(world: RankWorld, shared: Shared) -> dict[str, str]:
    """Return the class of the norm, or the error, with and without a compiler for each value of model.cpu_kernels."""
    from slime_like.train.megatron.model.layers import LayerParts
    from slime_like.train.megatron.model.model import _on_cpu_kernels
    from slime_like_plugins.megatron_cpu import layer

    def norm_class(setting: str) -> str:
        layer.kernels.cache_clear()
        try:
            return _on_cpu_kernels(LayerParts(), setting).norm.__name__
        except ConfigError as error:
            return str(error)

    out = {f"compiler, {setting}": norm_class(setting) for setting in ("auto", "c", "torch")}
    with mock.patch.dict(os.environ, {"PATH": "/nowhere", "CC": "", "XDG_CACHE_HOME": str(shared.scratch)}):
        out |= {f"none, {setting}": norm_class(setting) for setting in ("auto", "c", "torch")}
    layer.kernels.cache_clear()
    return out
