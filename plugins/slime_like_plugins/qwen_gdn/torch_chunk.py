"""Backend ``torch``: torch operations for any device, the default on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_like.config.schema.gdn import GDNConfig
from slime_like_plugins.qwen_gdn import causal_conv
from slime_like_plugins.qwen_gdn.chunk_backward import backward, project
from slime_like_plugins.qwen_gdn.chunk_forward import ChunkBlock, ChunkInputs, forward, prepare
from slime_like_plugins.qwen_gdn.packing import ChunkOrder, chunk_order

CHUNK = 32
SMALL_CHUNKS = ((32, 16),)
"""(maximum length of the longest sequence, chunk): a smaller chunk leaves less padding in the last chunk of each sequence."""


class TorchGDN:
    """Chunked rule over packed sequences with a hand-written backward, in float32, or in float64 for float64 inputs."""

    name = "torch"

    def __init__(self, config: GDNConfig | None = None) -> None:
        del config  # this backend has no options

    def chunk_rule(  # noqa: PLR0913
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the rule as ``backend.GDNBackend.chunk_rule`` describes.

        Raises ``ValueError`` if the shapes do not fit or ``packing.lengths`` rejects ``cu_seqlens_cpu``.
        """
        del cu_seqlens  # the copy on the host is sufficient
        _check_shapes(q, k, v, g, beta)
        order = chunk_order(cu_seqlens_cpu, q.shape[1], chunk_size(cu_seqlens_cpu), q.device)
        tensors = (q[0], k[0], v[0], g[0], beta[0], initial_state)
        needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        results: Any = _ChunkRule.apply(*tensors, _Call(order, needs_grad))
        return results[0].unsqueeze(0), results[1] if output_final_state else None

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        activation: str | None = "silu",
        halo: Tensor | None = None,
    ) -> Tensor:
        """Convolve as ``backend.GDNBackend.causal_conv`` describes."""
        del cu_seqlens
        return causal_conv.causal_conv(x, weight, cu_seqlens_cpu=cu_seqlens_cpu, activation=activation, halo=halo)

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> None:
        """Return None, so that ``state_passing`` exchanges the states."""

    def kernels(self) -> str:
        """Return the version of torch and a description of the algorithm."""
        return f"torch {torch.__version__}: chunks of at most {CHUNK}, batched matrix products, hand-written backward"


def chunk_size(cu_seqlens_cpu: Tensor) -> int:
    """Return the number of tokens per chunk for sequences with these bounds."""
    longest = int(cu_seqlens_cpu.diff().max()) if cu_seqlens_cpu.numel() > 1 else 0
    return next((chunk for max_len, chunk in SMALL_CHUNKS if longest <= max_len), CHUNK)


@dataclass(frozen=True, slots=True)
class _Call:
    """Non-tensor arguments of the rule. ``keep``: save tensors for backward."""

    order: ChunkOrder
    keep: bool


class _ChunkRule(torch.autograd.Function):
    """Chunked rule of q, k [T, H, K], v [T, HV, V], g, beta [T, HV] and a state [N, HV, K, V].

    The results are the output [T, HV, V] and the final state [N, HV, K, V].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor]:
        order, scale = call.order, q.shape[-1] ** -0.5
        x = prepare((q, k, v, g, beta), order, scale)
        shape = (len(order.sequences), v.shape[1], q.shape[2], v.shape[2])
        if initial is not None and initial.shape != shape:
            raise ValueError(f"initial_state {tuple(initial.shape)} must be [N, HV, K, V] = {shape}")
        sequences = torch.tensor(order.sequences, dtype=torch.int64, device=q.device)
        state = x.v.new_zeros(shape) if initial is None else initial.index_select(0, sequences).to(x.v.dtype)
        result = forward(x, state, order, keep=call.keep)
        if call.keep:
            saved_tensors = [tensor for block in result.blocks for tensor in block.tensors()]
            ctx.save_for_backward(*x.tensors(), sequences, *saved_tensors)
            ctx.order, ctx.scale = order, scale
            ctx.dtypes = [None if t is None else t.dtype for t in (q, k, v, g, beta, initial)]
        final = torch.empty_like(result.final).index_copy_(0, sequences, result.final)
        return order.unpack(result.out).to(v.dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved_tensors, order = list(ctx.saved_tensors), ctx.order
        x = ChunkInputs(*saved_tensors[: ChunkInputs.NUM_TENSORS])
        sequences, block_tensors = saved_tensors[ChunkInputs.NUM_TENSORS], saved_tensors[ChunkInputs.NUM_TENSORS + 1 :]
        size = ChunkBlock.NUM_TENSORS
        blocks = tuple(ChunkBlock(*block_tensors[first : first + size]) for first in range(0, len(block_tensors), size))
        dout = order.pack(grads[0]).to(x.v.dtype).contiguous()
        input_grads = backward(x, blocks, dout, grads[1].index_select(0, sequences).to(x.v.dtype), order)
        dkeys = project(x.keys, input_grads.keys, x.rstd, ctx.scale)
        dg = input_grads.gamma.flip(-1).cumsum(-1).flip(-1)
        rows = (
            dkeys[:, :, order.chunk :],
            dkeys[:, :, : order.chunk],
            input_grads.v,
            dg.unsqueeze(-1),
            input_grads.beta.unsqueeze(-1),
        )
        dq, dk, dv, dg, dbeta = (order.unpack(part).to(dtype) for part, dtype in zip(rows, ctx.dtypes, strict=False))
        dinitial = None
        if ctx.dtypes[5] is not None:
            dinitial = (
                torch.empty_like(input_grads.state).index_copy_(0, sequences, input_grads.state).to(ctx.dtypes[5])
            )
        return dq, dk, dv, dg.squeeze(-1), dbeta.squeeze(-1), dinitial, None


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ``ValueError`` if the shapes are inconsistent."""
    shapes = {name: tuple(t.shape) for name, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    fits = q.dim() == v.dim() == 4 and q.shape == k.shape and q.shape[0] == v.shape[0] == 1 and g.shape == beta.shape
    if not fits or v.shape[:3] != g.shape or q.shape[1] != v.shape[1] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"{shapes}: expected q, k [1, T, H, K], v [1, T, HV, V], g, beta [1, T, HV] with HV a multiple of H"
        )
