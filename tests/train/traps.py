"""Rank functions of test_traps: faults of megatron-core, with our fix and in the original code."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slime_like.config.schema.algo import GrpoConfig, SftConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import SlimeLikeError
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.lifecycle import batch, digest, train
from tests.train.models import count_tokens
from tests.train.ranks import RankWorld


def stock(module: str, name: str) -> Any:
    """Return the original object that a patch replaced."""
    from slime_like.train.megatron.platform import patches

    return patches.STOCK[module, name]


def outcome(function: Callable[[], Any]) -> str:
    """Return ``ok``, or the class name of the error."""
    try:
        function()
    except Exception as error:  # noqa: BLE001 (any error is a result)
        return type(error).__name__
    return "ok"


def resume_with_torch_adamw(world: RankWorld, shared: Shared) -> dict[str, str]:
    """Save and resume a run, with our AdamW and with megatron's fallback."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with contextlib.ExitStack() as stack:
        for module, names in (
            (optimizer, ("Adam", "USING_PYTORCH_OPTIMIZER")),
            (distrib_optimizer, ("Adam", "HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER")),
        ):
            for name in names:
                stack.enter_context(replace_attribute(module, name, stock(module.__name__, name)))
        upstream = outcome(lambda: _resume(world, shared, "stock"))
    return {"ours": outcome(lambda: _resume(world, shared, "ours")), "torch AdamW": upstream}


def _resume(world: RankWorld, shared: Shared, name: str) -> None:
    """Raise unless the resumed run equals the uninterrupted one bit for bit."""
    layout = Layout()
    actor = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    train(actor, layout, 1)
    save_checkpoint(actor, shared.scratch / name, 1)
    train(actor, layout, 2)
    train(actor, layout, 3)
    resumed = make_actor(world, shared.models["tied"], layout, algo=SftConfig())
    resumed.load(shared.scratch / name)
    train(resumed, layout, 2)
    train(resumed, layout, 3)
    if digest(resumed) != digest(actor):
        raise ArithmeticError("the resumed run differs")


def cpu_patches(world: RankWorld, shared: Shared) -> dict[str, str]:
    """Return the behaviour of the code that each patch replaces, on this machine."""
    from megatron.core.tensor_parallel import random

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    clip = stock("megatron.core.optimizer.clip_grads", "clip_grad_by_total_norm_fp32")
    x = torch.ones(3, requires_grad=True)
    patched_recompute = outcome(lambda: random.CheckpointWithoutOutput(fp8=False).checkpoint(torch.sin, x))
    with replace_attribute(random.CheckpointWithoutOutput, "__init__", stock("CheckpointWithoutOutput", "__init__")):
        recompute = outcome(lambda: random.CheckpointWithoutOutput(fp8=False).checkpoint(torch.sin, x))
    return {
        "clip": outcome(lambda: clip([parameter], 1.0, 2.0)),
        "rng": outcome(lambda: stock("megatron.core.tensor_parallel.random", "_get_cuda_rng_state")()),
        "recompute": recompute,
        "recompute with the patch": patched_recompute,
        "imported": ", ".join(sys.modules.keys() & {"wandb", "megatron.core.timers"}),
    }


def lone_replica(world: RankWorld, shared: Shared) -> dict[str, tuple[str, int]]:
    """Return the weights after a step of one data parallel replica, and the number of its exchanges of buffers."""
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from torch.profiler import ProfilerActivity, profile

    out: dict[str, tuple[str, int]] = {}
    for kind in ("ours", "upstream"):
        actor = make_actor(world, shared.models["tied"], Layout(), algo=SftConfig(), dtype="bfloat16")
        with contextlib.ExitStack() as stack:
            for name in ("dist_all_gather_func", "dist_reduce_scatter_func") if kind == "upstream" else ():
                stack.enter_context(replace_attribute(buffers, name, stock(buffers.__name__, name)))
            profiler = stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
            train(actor, Layout(), 1)
        exchanges = ("c10d::allgather_into", "c10d::_allgather_base", "c10d::reduce_scatter", "c10d::_reduce_scatter")
        out[kind] = (
            digest(actor),
            sum(event.count for event in profiler.key_averages() if event.key.startswith(exchanges)),
        )
    return out


def fused_cross_entropy(world: RankWorld, shared: Shared) -> dict[str, float]:
    """Return the relative errors of the logits' gradient against float64, of megatron's fused loss and of ours."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    from slime_like.train.megatron.model.vocab import VocabularyPart, vocab_scores

    make_actor(world, shared.models["tied"], Layout())  # for the process groups
    group = parallel_state.get_tensor_model_parallel_group()
    torch.manual_seed(0)
    logits_NV, target_N = torch.randn(8, 50), torch.randint(0, 50, (8,))
    exact = logits_NV.double().requires_grad_()
    torch.log_softmax(exact, -1).gather(1, target_N[:, None]).sum().backward()
    assert exact.grad is not None

    def error(grad: torch.Tensor | None) -> float:
        assert grad is not None and exact.grad is not None
        return float((grad.double() - exact.grad).abs().max() / exact.grad.abs().max())

    fused_logits = logits_NV.clone().requires_grad_()
    (-fused_vocab_parallel_cross_entropy(fused_logits[:, None], target_N[:, None], group).sum()).backward()
    our_logits = logits_NV.clone().requires_grad_()  # with an identity as projection, hidden states are logits
    part = VocabularyPart(0, 50, group)
    logprobs, _ = vocab_scores(our_logits, torch.eye(50), target_N, part=part, temperature=1.0, chunk=3, entropy=False)
    logprobs.sum().backward()
    return {"fused": error(fused_logits.grad), "ours": error(our_logits.grad)}


def decay(world: RankWorld, shared: Shared) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest factor by which a step without gradient changes norms and matrices."""
    from slime_like.train.megatron.model.model import named_weights

    actor = make_actor(world, shared.models["untied"], Layout(), optim={"lr": 0.01, "weight_decay": 0.5})
    before = {key: p.detach().clone() for key, p in named_weights(actor.model)}
    rows = [dataclasses.replace(r, advantages=np.zeros(len(r.sample_ids), np.float32)) for r in batch(1)]
    actor.train_rollout([rows], [count_tokens(rows)])
    factors: dict[str, list[torch.Tensor]] = {"norm": [], "matrix": []}
    for key, parameter in named_weights(actor.model):
        real = before[key] != 0  # the vocabulary's padding rows are 0
        factors["norm" if "norm" in key else "matrix"].append((parameter.detach()[real] / before[key][real]).flatten())
    return {kind: (float(torch.cat(f).min()), float(torch.cat(f).max())) for kind, f in factors.items()}


def refused(world: RankWorld, shared: Shared) -> dict[str, str]:
    """Return the errors on specs that cannot be built."""
    specs: dict[str, dict[str, Any]] = {
        "unknown field": {"model": {"megatron": {"layernorm_epsilom": 1e-5}}},
        "unusable field": {"model": {"megatron": {"recompute_granularity": "some"}}},
        "derived field": {"model": {"megatron": {"attention_dropout": 0.1}}},
        "warm-up": {"optim": {"warmup_steps": 10, "schedule": "cosine"}},
        "ref_checkpoint": {"model": {"ref_checkpoint": "/no/such/folder"}, "algo": GrpoConfig(kl_loss_coef=0.1)},
    }
    out: dict[str, str] = {}
    for name, spec in specs.items():
        try:
            make_actor(world, shared.models["tied"], Layout(), **spec)
        except SlimeLikeError as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def unmarked_experts(world: RankWorld, shared: Shared) -> dict[str, str]:
    """Load a checkpoint of experts on two ranks where each rank has all experts, with and without ``mark_experts``."""
    from slime_like.train.megatron.step import optim

    layout, folder = Layout(dp=2), shared.scratch / "saved"
    source_actor = make_actor(world, shared.models["few experts"], Layout(dp=2, ep=2), algo=SftConfig())
    train(source_actor, layout, 1)
    save_checkpoint(source_actor, folder, 1)
    marked = make_actor(world, shared.models["few experts"], layout, algo=SftConfig())
    with replace_attribute(optim, "mark_experts", lambda model: None):
        unmarked = make_actor(world, shared.models["few experts"], layout, algo=SftConfig())
    return {"ours": outcome(lambda: marked.load(folder)), "upstream": outcome(lambda: unmarked.load(folder))}


def pipeline_shapes(world: RankWorld, shared: Shared) -> dict[str, tuple[list[int], list[int]]]:
    """Return the shapes that a pipeline rank receives when both ranks send to their next and to their previous rank."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    trainer = make_actor(world, shared.models["tied"], Layout(pp=2))
    communicator: Any = P2PCommunicator(trainer.rank_info.pp_group, trainer.model.last.config)
    to_next, to_previous = torch.zeros(1 + world.rank, 1, 8), torch.zeros(11 + world.rank, 1, 8)
    shapes = communicator._communicate_shapes(to_next, to_previous, True, True)
    exchange = stock("P2PCommunicator", "_communicate_shapes")
    return {"ours": shapes, "upstream": exchange(communicator, to_next, to_previous, True, True)}
