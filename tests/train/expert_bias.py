"""Rank function of test_latent, and its reference: the update of expert biases without an auxiliary loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.jobs import Shared, make_actor, save_checkpoint
from tests.train.models import count_tokens
from tests.train.parity import ALGO, batch, shard_of
from tests.train.ranks import RankWorld

RATE = 0.01
SETTINGS: dict[str, Any] = {"algo": ALGO, "model": {"megatron": {"moe_router_bias_update_rate": RATE}}}


def update_and_resume(world: RankWorld, shared: Shared, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Take one optimizer step. Return this rank's expert biases by key, before and after a save and a resume."""
    from slime_like.train.megatron.model.model import ROUTER_BIAS, named_weights

    def biases(actor: Any) -> dict[str, Tensor]:
        return {key: weight.clone() for key, weight in named_weights(actor.model) if key.endswith(ROUTER_BIAS)}

    actor = make_actor(world, shared.models["deepseek_v3"], layout, **SETTINGS)
    rows = batch()
    actor.train_rollout([shard_of(rows, layout, actor.rank_info.dp_rank, join=True)], [count_tokens(rows)])
    save_checkpoint(actor, shared.scratch, 1)
    resumed = make_actor(world, shared.models["deepseek_v3"], layout, **SETTINGS)
    resumed.load(shared.scratch)
    return biases(actor), biases(resumed)


@torch.no_grad()
def updated_by_hf(folder: Path) -> dict[str, Tensor]:
    """Return the expert biases by key after one update, from the experts that transformers chooses for ``batch()``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=HFFolder(folder).config(), dtype=torch.float32)
    gates = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    counts = {name: torch.zeros(gate.e_score_correction_bias.shape) for name, gate in gates.items()}

    def count(name: str) -> Any:
        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            counts[name] += torch.bincount(outputs[2].flatten(), minlength=len(counts[name]))

        return hook

    for name, gate in gates.items():
        gate.register_forward_hook(count(name))
    for rows in batch():
        for start, stop in zip(rows.cu_seqlens[:-1], rows.cu_seqlens[1:], strict=True):
            model(input_ids=torch.from_numpy(rows.token_ids[start:stop].astype(np.int64))[None])
    return {
        f"blocks.{name.split('.')[2]}.mlp.router.expert_bias": gate.e_score_correction_bias
        + RATE * torch.sign(counts[name].mean() - counts[name])
        for name, gate in gates.items()
    }
