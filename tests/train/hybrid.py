"""Rank functions of test_hybrid: save, load in other layouts, train in 16 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.resolved import Layout
from tests.train import options
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.lifecycle import digest, fewest_micro_batches, train
from tests.train.parity import DECAYS
from tests.train.ranks import RankWorld
from tests.train.traps import outcome, stock


def save(world: RankWorld, shared: Shared, kind: str, layout: Layout) -> list[float | None]:
    """Take two optimizer steps, save, and return the losses of the next two."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    make = fewest_micro_batches(layout)
    for seed in (1, 2):
        train(actor, layout, seed, make=make)
    save_checkpoint(actor, shared.scratch, 2)
    return [train(actor, layout, seed, make=make).get("train/loss") for seed in (3, 4)]


def resume(
    world: RankWorld, shared: Shared, kind: str, sources: Sequence[str], layout: Layout
) -> dict[str, list[float | None]]:
    """Return the next two losses after loading the checkpoint of each source."""
    actor = make_actor(world, shared.models[kind], layout, algo=SftConfig())
    make = fewest_micro_batches(layout)
    out: dict[str, list[float | None]] = {}
    for source in sources:
        actor.load(shared.scratch.with_name(source.replace(" ", "_")))
        out[source] = [train(actor, layout, seed, make=make).get("train/loss") for seed in (3, 4)]
    return out


def half(world: RankWorld, shared: Shared, kind: str, layout: Layout) -> dict[str, Any]:
    """Take a step that is too small for bfloat16, save and load. Return checks of the decays and of the resumed run."""
    options: dict[str, Any] = {"algo": SftConfig(), "dtype": "bfloat16", "optim": {"lr": 1e-5}}
    actor = make_actor(world, shared.models[kind], layout, **options)
    before = {name: p.detach().clone() for name, p in _parameters(actor)}
    loss = train(actor, layout, 1).get("train/loss")
    save_checkpoint(actor, shared.scratch, 1)
    resumed = make_actor(world, shared.models[kind], layout, **options)
    resumed.load(shared.scratch, 1)
    is_same = digest(resumed) == digest(actor)
    distances = {name: float((p.detach() - before[name]).abs().max()) for name, p in _parameters(actor)}
    train(actor, layout, 2)
    train(resumed, layout, 2)
    return {
        "loss": loss,
        "dtypes": {str(p.dtype) for name, p in _parameters(actor) if name.endswith(DECAYS)},
        "others": {str(p.dtype) for name, p in _parameters(actor) if not name.endswith(DECAYS)},
        "moved": min(distance for name, distance in distances.items() if name.endswith(DECAYS)),
        "rounded": [n for n, p in _parameters(actor) if n.endswith(DECAYS) and torch.equal(p.bfloat16().float(), p)],
        "loaded": is_same,
        "continues": digest(resumed) == digest(actor),
        "exported": {t.dtype for t in actor.hf_export.manifest() if t.name.endswith(DECAYS)},
    }


def overlap(world: RankWorld, shared: Shared, kind: str, layout: Layout, fault: bool) -> list[str]:
    """Return the weights after each of two rollouts. The fault reads the convolution's weight without the gather."""
    from slime_like_plugins.qwen_gdn.layer import GatedDeltaNetLayer

    unsynced = replace_attribute(GatedDeltaNetLayer, "_conv_weight", lambda layer: layer.conv1d.weight[:, 0])
    with unsynced if fault else contextlib.nullcontext():
        try:
            return options.overlap(world, shared, kind, layout, None).weights
        except AssertionError:  # raised by megatron at the next gather of the bucket
            assert fault
            return []


def upstream(world: RankWorld, shared: Shared, kind: str) -> dict[str, str]:
    """Return the outcome of a save with our patches, and without each of them."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.ssm.gated_delta_net import common

    def save() -> None:
        actor = make_actor(world, shared.models[kind], Layout(), algo=SftConfig(), dtype="bfloat16")
        train(actor, Layout(), 1)
        save_checkpoint(actor, shared.scratch, 1)

    name = "_build_optimizer_group_ranges"
    out = {"ours": outcome(save)}
    with replace_attribute(DistributedOptimizer, name, stock("DistributedOptimizer", name)):
        out["groups of two dtypes"] = outcome(save)
    with replace_attribute(common, "HAVE_FLA", stock(common.__name__, "HAVE_FLA")):
        out["no fla"] = outcome(save)
    return out


def half_norms(world: RankWorld, shared: Shared) -> dict[str, dict[str, float]]:
    """Return relative errors of bfloat16 norms against float64, and the bytes saved for backward in other dtypes."""
    from slime_like.train.megatron.model.norms import GatedHeadNorm, RMSNorm

    config: Any = SimpleNamespace(
        params_dtype=torch.bfloat16, layernorm_zero_centered_gamma=True, sequence_parallel=False
    )
    config.tensor_model_parallel_size = 1
    out: dict[str, dict[str, float]] = {}
    for name, norm in (("zero-centred", RMSNorm(config, 48)), ("gated", GatedHeadNorm(config, 48))):
        torch.manual_seed(0)
        inputs = [torch.randn(5, 7, 48).bfloat16().requires_grad_() for _ in range(1 if name != "gated" else 2)]
        with torch.no_grad():
            norm.weight.add_(0.3 * torch.randn(48))
        wide_inputs: Any = [x.detach().double().requires_grad_() for x in (*inputs, norm.weight)]
        scale = wide_inputs[-1] + (1 if name != "gated" else 0)
        exact = torch.nn.functional.rms_norm(wide_inputs[0], (48,), scale, norm.eps)
        exact = exact * torch.nn.functional.silu(wide_inputs[1]) if name == "gated" else exact
        saved_tensors: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, k=saved_tensors: (k.append(x), x)[1], lambda x: x):
            actual = norm(*inputs)
        grad = torch.randn(5, 7, 48).bfloat16()
        actual.backward(grad)
        exact.backward(grad.double())
        pairs: Any = [
            (actual, exact),
            *((x.grad, w.grad) for x, w in zip((*inputs, norm.weight), wide_inputs, strict=True)),
        ]
        errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
        out[name] = {
            "error": max(errors),
            "wide bytes": sum(4 * k.numel() for k in saved_tensors if k.dtype != torch.bfloat16),
        }
    return out


def _parameters(actor: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return list(actor.model.named_parameters())
