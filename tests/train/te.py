"""Rank functions for TransformerEngine's attention: its inputs on any machine, its results where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from slime_like.train.megatron.platform import host
from tests.train import parity
from tests.train.jobs import Shared, annotated, start_trainer
from tests.train.models import count_tokens, make_rows, make_spec
from tests.train.ranks import RankWorld

HALF: dict[str, Any] = {"dtype": "bfloat16", "algo": parity.ALGO, "temperature": parity.TEMPERATURE}


def on_cpu(world: RankWorld, shared: Shared, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    """Return TransformerEngine's inputs per (cp, rank), and the error if TransformerEngine is not installed."""
    from slime_like.train.megatron.model.forward import make_micro
    from slime_like.train.megatron.model.model import _core_attention
    from slime_like.train.megatron.platform.groups import RankInfo

    parameters: dict[tuple[int, int], dict[str, Any]] = {}
    for cp, rank in ((size, rank) for size in sizes for rank in range(size)):
        rank_info = RankInfo(
            Layout(cp=cp),
            torch.device("cpu"),
            0,
            0,
            rank,
            0,
            *[None] * 5,
            ep_rank=0,
            etp_rank=0,
            expert_dp_rank=0,
            expert_group=None,
        )
        micro = make_micro(make_rows(lengths, 0), rank_info)
        fields = vars(micro.packed.on_device())
        parameters[cp, rank] = {
            key: value.numpy() if isinstance(value, Tensor) else value for key, value in fields.items()
        }
        parameters[cp, rank] |= {"tokens": len(micro.layout.position_ids), "local_index": micro.layout.local_index}
    refusal = None
    try:
        _core_attention("te", is_batch_invariant=False)
    except ConfigError as error:
        refusal = str(error)
    return {"parameters": parameters, "refusal": refusal}


def on_gpu(world: RankWorld, folder: Path, cp: int) -> dict[str, Any]:
    """Compare each attention in bfloat16 with HF in float32, and the two core attentions on the same random rows."""
    host.install("cuda")

    ref, rows = parity.reference(folder), parity.batch()
    out: dict[str, Any] = {}
    results_of: dict[str, list[Tensor]] = {}
    for name in ("torch", "te"):
        spec = make_spec(folder, Layout(cp=cp), device="cuda", model={"attention": name}, **HALF)
        trainer = start_trainer(world, spec, local_rank=world.rank)
        scores = [trainer.score(r) for r in rows]
        micros = annotated(trainer, rows)
        trainer.optimizer_step.backward(micros, count_tokens(rows), None)
        grads = {key: grad.cuda() for key, grad in ref.grads.items()}
        core = next(m for m in trainer.model.modules() if type(m).__name__ in ("PackedAttention", "TEAttention"))
        results_of[name] = _attend(core, micros[0].packed, len(micros[0].layout.local_index))
        out[name] = {
            "core": type(core).__name__,
            "grad": max(parity.gradient_errors(trainer, grads).values()),
            "score": max(float(np.abs(s - e).max()) for s, e in zip(scores, ref.logprobs, strict=True) if s is not None)
            if trainer.rank_info.is_reporter
            else 0.0,
        }
    pairs = zip(("out", "query", "key", "value"), results_of["te"], results_of["torch"], strict=True)
    return out | {"core": {name: float((a - b).abs().max() / b.abs().max()) for name, a, b in pairs}}


def _attend(core: Any, packed: Any, num_tokens: int) -> list[Tensor]:
    """Return output and gradients for random queries, keys and values of 4 heads, 2 groups and 16 dimensions."""
    torch.manual_seed(torch.distributed.get_rank())
    shapes = [(num_tokens, heads, 16) for heads in (4, 2, 2)]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    out = core(*leaves, None, packed_seq_params=packed)
    assert out.shape == (num_tokens, 64)
    out.backward(torch.randn_like(out))
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]
