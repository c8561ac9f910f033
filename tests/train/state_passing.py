"""Ranks of test_state_passing: a convolution and a gated delta rule over ranges of a packed stream, beside the whole stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.train.megatron.layout import token_layout
from slime_like.train.megatron.stream import stream_part
from tests.train.jobs import Shared
from tests.train.ranks import World

H, HV, K, V, W = 2, 4, 8, 6, 4
D = 2 * H * K + HV * V


@dataclass(frozen=True)
class Case:
    """Lengths of packed sequences, and what the gates are scaled by (small: long memory)."""

    lengths: tuple[int, ...]
    gate: float = 1.0


def errors(world: World, shared: Shared, cases: list[Case]) -> list[dict[str, float]]:
    """Per case the largest error of outputs and of each gradient, relative to its largest entry; all ranks share the stream."""
    del shared
    if not dist.is_initialized():
        meeting = f"tcp://{world.host}:{world.port}"
        dist.init_process_group("gloo", init_method=meeting, rank=world.rank, world_size=world.size)
    return [_errors(world, world.size, case) for case in cases]


def _errors(world: World, cp: int, case: Case) -> dict[str, float]:
    from slime_like_plugins.qwen_gdn import state_passing

    rows = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    layout = token_layout(rows, cp=cp, cp_rank=world.rank)
    whole = _inputs(int(layout.padded_cu_seqlens[-1]), case.gate)
    expected = _whole(whole, layout.padded_cu_seqlens)
    mine = torch.from_numpy(layout.local_index)
    local = [x.detach()[mine].requires_grad_() if x.shape[0] == len(whole[0]) else _leaf(x) for x in whole]
    part = stream_part(layout.padded_cu_seqlens, cp=cp, cp_rank=world.rank)
    here = state_passing.Range.on_device(part, world.rank, dist.group.WORLD, torch.device("cpu"))
    x, gates, weight = local
    stream = here.to_stream(torch.cat((x, gates), 1))
    mixed = state_passing.causal_conv(_backend(), stream[:, :D], weight, here, "silu")
    q, k, v, g, beta = _columns(mixed, stream[:, D:])
    out = state_passing.gated_delta_rule(_backend(), q, k, v, g, beta, here)
    back = here.to_rows(out[0])
    (back * _upstream(int(layout.padded_cu_seqlens[-1]))[mine]).sum().backward()
    dist.all_reduce(_grad(weight))
    got = [back, *map(_grad, local)]
    wanted = [expected[0][mine], expected[1][mine], expected[2][mine], expected[3]]
    scales = [float(t.abs().max()) for t in expected]
    names = ("out", "x", "gates", "weight")
    return {
        name: float((a.detach() - b).abs().max()) / scale
        for name, a, b, scale in zip(names, got, wanted, scales, strict=True)
    }


def _backend() -> Any:
    from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

    return TorchGDN()


def _inputs(size: int, gate: float) -> list[Tensor]:
    random = torch.Generator().manual_seed(size)
    x = torch.randn(size, D, generator=random, dtype=torch.float64)
    decay = -gate * torch.rand(size, HV, generator=random, dtype=torch.float64)
    beta = torch.rand(size, HV, generator=random, dtype=torch.float64)
    weight = torch.randn(D, W, generator=random, dtype=torch.float64)
    return [_leaf(t) for t in (x, torch.cat((decay, beta), 1), weight)]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _upstream(size: int) -> Tensor:
    return torch.randn(size, HV, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _columns(mixed: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    q, k, v = mixed.split((H * K, H * K, HV * V), -1)
    g, beta = gates.split(HV, -1)
    shaped = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), g, beta
    return tuple(t[None] for t in shaped)


def _whole(leaves: list[Tensor], bounds: np.ndarray) -> list[Tensor]:
    """Output and gradients of the stream on one rank."""
    x, gates, weight = leaves
    cu = torch.from_numpy(bounds)
    mixed = _backend().causal_conv(x[None], weight, cu_seqlens=cu, cu_seqlens_cpu=cu, activation="silu")[0]
    out, _ = _backend().chunk_rule(*_columns(mixed, gates), cu_seqlens=cu, cu_seqlens_cpu=cu)
    (out[0] * _upstream(len(x))).sum().backward()
    return [out[0].detach(), *map(_grad, leaves)]
