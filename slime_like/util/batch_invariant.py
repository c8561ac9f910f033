"""Batch-invariant arithmetic on a CPU, shared by engine and trainer: each output row is bitwise independent of the other rows.

MKL's float32 GEMMs have this property with at least ``ROWS`` rows, ``COLUMNS`` columns and one thread; smaller or
multi-threaded GEMMs use kernels with another order of summation. Inputs are therefore padded to ``ROWS`` rows, and attention
sums over keys in blocks of fixed size at fixed positions. Weights are not padded: they must have ``COLUMNS`` outputs or more.
float64 GEMMs do not have the property at any shape. MKL does not guarantee any of this: ``check_machine`` tests it on the
current machine.

Axes: b batch, K KV heads, R query rows (all query heads of a KV head, all positions), L keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16  # AMD EPYC needs 4; an Intel Xeon with AVX-512 needs 16 for GEMMs with 384 inputs or more
COLUMNS = 16
BLOCK = 64  # keys summed by one GEMM
MAX_SCORES = 1 << 22  # attention scores in memory at a time
MAX_CHECKED_COLUMNS = 4_096  # largest number of columns that ``check_machine`` tests


def padded_rows(x_TI: Tensor) -> Tensor:
    """Return ``x``, filled up to ``ROWS`` rows with copies of its last row. The caller drops the results of the copies."""
    num_copies = ROWS - x_TI.shape[0]
    return x_TI if num_copies <= 0 or x_TI.shape[0] == 0 else torch.cat([x_TI, x_TI[-1:].expand(num_copies, -1)])


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``x @ weight.T`` [T, O], each row independent of the others."""
    return (padded_rows(x_TI) @ weight_OI.T)[: x_TI.shape[0]]


def attention(q_bKRD: Tensor, k_bKLD: Tensor, v_bKLD: Tensor, visible_bRL: Tensor, scale: float) -> Tensor:
    """Return softmax attention [b, K, R, D] over the keys that ``visible`` selects; each row must see at least one key.

    ``visible`` is [b, 1, L] if all rows see the same keys.
    Bitwise, a row depends only on its query, its visible keys with their values, and the positions of these keys: masked keys
    add exact zeros, and the sums over blocks of ``BLOCK`` keys are added in float64, in order.
    """
    rows, length = q_bKRD.shape[2], k_bKLD.shape[2]
    padding = -length % BLOCK
    k_bKLD, v_bKLD = F.pad(k_bKLD, (0, 0, 0, padding)).contiguous(), F.pad(v_bKLD, (0, 0, 0, padding)).contiguous()
    visible_bRL = F.pad(visible_bRL, (0, padding), value=False)
    num_copies = max(0, ROWS - rows)
    if num_copies:
        q_bKRD = torch.cat([q_bKRD, q_bKRD[:, :, -1:].expand(-1, -1, num_copies, -1)], 2)
        if visible_bRL.shape[1] > 1:
            visible_bRL = torch.cat([visible_bRL, visible_bRL[:, -1:].expand(-1, num_copies, -1)], 1)
    chunk = max(ROWS, MAX_SCORES // (q_bKRD.shape[0] * q_bKRD.shape[1] * k_bKLD.shape[2]))
    parts: list[Tensor] = []
    for start, stop in _spans(q_bKRD.shape[2], chunk):
        mask_bRL = visible_bRL if visible_bRL.shape[1] == 1 else visible_bRL[:, start:stop]
        parts.append(_attend(q_bKRD[:, :, start:stop].contiguous(), k_bKLD, v_bKLD, mask_bRL, scale))
    return torch.cat(parts, 2)[:, :, :rows]


def _attend(q_bKRD: Tensor, k_bKLD: Tensor, v_bKLD: Tensor, visible_bRL: Tensor, scale: float) -> Tensor:
    blocks = k_bKLD.shape[2] // BLOCK
    scores_bKRL = (q_bKRD @ k_bKLD.transpose(-1, -2)).double() * scale
    scores_bKRL = scores_bKRL.masked_fill(~visible_bRL[:, None], float("-inf"))
    weights_bKRL = torch.exp(scores_bKRL - scores_bKRL.amax(-1, keepdim=True).detach())
    total_bKRN = weights_bKRL.unflatten(-1, (blocks, BLOCK)).sum(-1)
    narrow_bKRL = weights_bKRL.to(v_bKLD.dtype)
    out, total = 0.0, 0.0
    for block in range(blocks):
        keys = slice(block * BLOCK, (block + 1) * BLOCK)
        out = out + (narrow_bKRL[..., keys].contiguous() @ v_bKLD[:, :, keys].contiguous()).double()
        total = total + total_bKRN[..., block]
    assert isinstance(out, Tensor) and isinstance(total, Tensor)
    return (out / total[..., None]).to(v_bKLD.dtype)


def _spans(num_rows: int, chunk: int) -> Iterable[tuple[int, int]]:
    """Split ``range(num_rows)`` into spans of ``chunk``; a last span shorter than ``ROWS`` is merged into the one before it."""
    starts = list(range(0, num_rows, chunk))
    if len(starts) > 1 and num_rows - starts[-1] < ROWS:
        starts.pop()
    return zip(starts, [*starts[1:], num_rows], strict=True)


def log_softmax(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """Return log-probabilities [N, V] at a temperature, by the same formula in engine and trainer."""
    return torch.log_softmax(logits_NV.float() / temperature_N1, dim=-1)


def check_machine(shapes: Iterable[tuple[int, int]]) -> str | None:
    """Test GEMMs of these (output, input) sizes on this machine. Return a message if a row depends on other rows, else None.

    Output sizes above ``MAX_CHECKED_COLUMNS`` are tested as ``MAX_CHECKED_COLUMNS``.
    """
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in sorted({(min(outputs, MAX_CHECKED_COLUMNS), inputs) for outputs, inputs in shapes}):
        weight = torch.randn(outputs, inputs, generator=generator)
        x = torch.randn(67, inputs, generator=generator)
        expected = linear(x, weight)
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 33, 64):
            if not torch.equal(linear(x[-rows:], weight), expected[-rows:]):
                return (
                    f"a product of {rows} rows with a [{outputs}, {inputs}] matrix differs from these rows in a product of 67 rows "
                    f"({torch.get_num_threads()} threads): in this machine's BLAS a row depends on other rows"
                )
    return None
