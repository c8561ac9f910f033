"""Rank functions of test_residency: the same rollouts with and without moving a rank's state between the phases."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.residency import COLLECT, GRADIENTS, OPTIMIZER, PUSH, SAVE, STEP, TRAINER_PHASES, WEIGHTS
from slime_like.config.schema.resolved import Layout
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.lifecycle import batch, train
from tests.train.ranks import RankWorld

ALGO = GrpoConfig(kl_loss_coef=0.1)
PHASES = (PUSH, COLLECT, STEP, SAVE)


def rollouts(
    world: RankWorld, shared: Shared, layout: Layout, kind: str, spec: Mapping[str, Any], fault: bool = False
) -> dict[str, Any]:
    """Return the results of two rollouts with and without offload, and the bytes of each part on the device by phase.

    With ``fault``, weights and optimizer state become zeros instead of their host copies.
    """
    resident = _run(world, shared, layout, kind, spec, lambda actor, phase: None, saves=False)
    num_bytes: dict[str, tuple[int, ...]] = {}

    def move(actor: Any, phase: str) -> None:
        actor.device_state.keep(TRAINER_PHASES[phase])
        parts = (WEIGHTS, GRADIENTS, OPTIMIZER)
        num_bytes[phase] = tuple(actor.device_state.num_bytes(part) for part in parts)

    if not fault:
        return {"resident": resident, "offloaded": _run(world, shared, layout, kind, spec, move), "bytes": num_bytes}
    from slime_like.train.megatron.rank import residency

    with replace_attribute(residency, "copy_from_host", lambda pieces, copies: [p.zero_() for _, p in pieces]):
        return {"resident": resident, "offloaded": _run(world, shared, layout, kind, spec, move), "bytes": num_bytes}


def _run(
    world: RankWorld,
    shared: Shared,
    layout: Layout,
    kind: str,
    spec: Mapping[str, Any],
    move: Callable[[Any, str], None],
    *,
    saves: bool = True,
) -> list[Any]:
    """Return the results of two rollouts. ``move`` is called at the start of each phase; ``saves``: save after each rollout."""
    actor = make_actor(world, shared.models[kind], layout, algo=ALGO, **spec)
    out: list[Any] = []
    for seed in (1, 2):
        move(actor, PUSH)
        exported = sum(float(t.double().sum()) for b in actor.hf_export.buckets(1 << 20) for _, t in b.tensors)
        score = actor.score(batch(seed)[0])
        move(actor, COLLECT)
        move(actor, STEP)
        metrics = train(actor, layout, seed)
        move(actor, SAVE)
        if saves:
            save_checkpoint(actor, shared.scratch / f"residency_{seed}", seed)
        times = {name for name in metrics if name.startswith("perf/")}
        out += [exported, None if score is None else score.tolist(), _digest(actor)]
        out.append({name: value for name, value in metrics.items() if name not in times})
    return out


def _digest(actor: Any) -> str:
    """Return a hash of this rank's weights. NumPy reads copies, so that the storages of the weights stay resizable."""
    sha = hashlib.sha256()
    for parameter in actor.model.parameters():
        sha.update(parameter.detach().clone().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
