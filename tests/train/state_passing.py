"""Rank functions of test_state_passing: convolution and gated delta rule over ranges and over the full stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.train.megatron.model.layout import token_layout
from tests.train.jobs import Shared
from tests.train.ranks import RankWorld

H, HV, K, V, W = 2, 4, 16, 12, 4
D = 2 * H * K + HV * V


@dataclass(frozen=True)
class PackedCase:
    """Lengths of packed sequences, and the scale of the log decays (small: slow decay)."""

    lengths: tuple[int, ...]
    gate: float = 1.0


def errors(world: RankWorld, shared: Shared, cases: list[PackedCase]) -> list[dict[str, float]]:
    """Return per case the relative errors of outputs and gradients. The ranks share the stream."""
    del shared
    join_group(world)
    return [range_errors(world, case, _backend(), torch.float64) for case in cases]


def on_gpus(world: RankWorld, cases: list[PackedCase]) -> list[dict[str, float]]:
    """Return the same as ``errors`` for fla in float32, with one GPU per rank."""
    from slime_like_plugins.qwen_gdn.fla import FlaGDN

    torch.cuda.set_device(world.rank)
    join_group(world, "nccl")
    backend = FlaGDN()
    return [range_errors(world, case, backend, torch.float32, "cuda") for case in cases]


def join_group(world: RankWorld, backend: str = "gloo") -> None:
    """Create the default process group of the ranks."""
    if not dist.is_initialized():
        address = f"tcp://{world.host}:{world.port}"
        dist.init_process_group(backend, init_method=address, rank=world.rank, world_size=world.size)


def kept_bounds(world: RankWorld, shared: Shared) -> list[int]:
    """Count the distinct bounds tensors that a backend has received after each of two layers of two micro-batches."""
    from slime_like.train.megatron.model.layers import PackedRows
    from slime_like_plugins.qwen_gdn.mixing import DeltaInputs, MixingHeads
    from slime_like_plugins.qwen_gdn.state_passing import StatePassing

    del shared
    join_group(world)
    backend, heads = _recording(), MixingHeads(H, HV, K, V)
    counts: list[int] = []
    for bounds in ((0, 24, 64), (0, 40, 64)):
        packed = PackedRows(cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32))
        size = bounds[-1] // world.size
        for _ in range(2):
            layer = StatePassing(backend, heads, dist.group.WORLD)
            shapes = (size, D), (size, HV), (size, HV), (D, W), (HV,), (HV,)
            qkv, beta, alpha, weight, decay, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
            layer(DeltaInputs(qkv, beta, alpha, weight, decay, bias), packed)
            counts.append(len({id(tensor) for tensor in backend.bounds_seen}))
    return counts


def moves_hidden(world: RankWorld, shared: Shared) -> list[bool]:
    """Return whether hidden states, not projections, move between ranks.

    Cases: Qwen3-Next's layer, the layer with input split by sequence parallelism, and the layer split over tp ranks.
    """
    from slime_like_plugins.qwen_gdn.mixing import MixingHeads
    from slime_like_plugins.qwen_gdn.state_passing import StatePassing

    del shared
    join_group(world)
    layers = (
        (MixingHeads(16, 32, 128, 128), 2048),
        (MixingHeads(16, 32, 128, 128), 0),
        (MixingHeads(4, 8, 128, 128), 2048),
    )
    return [StatePassing(_backend(), heads, dist.group.WORLD, hidden).moves_hidden for heads, hidden in layers]


def _recording() -> Any:
    """Return a torch backend that records every tensor of bounds."""
    from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

    class RecordingChain(TorchGDN):
        def __init__(self) -> None:
            super().__init__()
            self.bounds_seen: list[Tensor] = []

        def chunk_rule(self, *args: Any, **kwargs: Any) -> Any:
            self.bounds_seen += [kwargs["cu_seqlens"], kwargs["cu_seqlens_cpu"]]
            return super().chunk_rule(*args, **kwargs)

        def causal_conv(self, *args: Any, **kwargs: Any) -> Any:
            self.bounds_seen += [kwargs["cu_seqlens"], kwargs["cu_seqlens_cpu"]]
            return super().causal_conv(*args, **kwargs)

    return RecordingChain()


def range_errors(
    world: RankWorld, case: PackedCase, backend: Any, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, float]:
    """Return the errors of one case with ``backend``; torch computes the full stream in float64."""
    from slime_like_plugins.qwen_gdn import ranges, state_passing

    cp = world.size
    rows = np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32)
    layout = token_layout(rows, cp=cp, cp_rank=world.rank)
    inputs = _inputs(int(layout.padded_cu_seqlens[-1]), case.gate)
    expected = _full_stream(inputs, layout.padded_cu_seqlens)
    local_index = torch.from_numpy(layout.local_index)
    local = [_leaf(x[local_index] if x.shape[0] == len(inputs[0]) else x, dtype, device) for x in inputs]
    bounds = tuple(layout.padded_cu_seqlens.tolist())
    token_range = ranges.range_of(bounds, dist.group.WORLD, local[0].device, backend)
    x, gates, weight = local
    stream = token_range.to_stream(torch.cat((x, gates), 1))
    mixed = state_passing.causal_conv(backend, stream[:, :D], weight, token_range, "silu")
    q, k, v, g, beta = _columns(mixed, stream[:, D:])
    out = state_passing.gated_delta_rule(backend, q, k, v, g, beta, token_range)
    out_rows = token_range.to_rows(out[0])
    (out_rows * _upstream(int(layout.padded_cu_seqlens[-1]))[local_index].to(device)).sum().backward()
    dist.all_reduce(_grad(weight))
    results = [out_rows, *map(_grad, local)]
    expected_results = [expected[0][local_index], expected[1][local_index], expected[2][local_index], expected[3]]
    scales = [float(t.abs().max()) for t in expected]
    names = ("out", "x", "gates", "weight")
    return {
        name: float((a.detach().cpu() - b).abs().max()) / scale
        for name, a, b, scale in zip(names, results, expected_results, scales, strict=True)
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


def _leaf(tensor: Tensor, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    return tensor.detach().to(device, dtype, copy=True).requires_grad_()


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


def _full_stream(leaves: list[Tensor], bounds: np.ndarray) -> list[Tensor]:
    """Return output and gradients of the stream on one rank."""
    x, gates, weight = leaves
    cu = torch.from_numpy(bounds)
    mixed = _backend().causal_conv(x[None], weight, cu_seqlens=cu, cu_seqlens_cpu=cu, activation="silu")[0]
    out, _ = _backend().chunk_rule(*_columns(mixed, gates), cu_seqlens=cu, cu_seqlens_cpu=cu)
    (out[0] * _upstream(len(x))).sum().backward()
    return [out[0].detach(), *map(_grad, leaves)]
