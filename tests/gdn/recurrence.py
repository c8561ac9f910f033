"""Reference of every GDN backend: gated delta rule and causal convolution by definition, token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like_plugins.qwen_gdn.backend import NORM_EPS, GatedDeltaRule, GDNBackend

LAYER_F32 = ("g", "beta", "initial")
"""Inputs of a rule that the Gated DeltaNet layer passes in float32 for any dtype of the other inputs."""


@dataclass(frozen=True, slots=True)
class RecurrenceCase:
    """Inputs of one call for N sequences. Rows beyond the last of ``cu_seqlens`` are padding."""

    q: Tensor  # [1, T, H, K]
    k: Tensor  # [1, T, H, K]
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV]
    beta: Tensor  # [1, T, HV]
    initial: Tensor | None  # [N, HV, K, V]
    cu_seqlens: tuple[int, ...]

    @property
    def bounds(self) -> Tensor:
        """Return ``cu_seqlens`` as a CPU tensor."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32)

    def leaves(self) -> dict[str, Tensor]:
        """Return every differentiable input by name."""
        columns = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "cu_seqlens"}
        return {name: tensor for name, tensor in columns.items() if tensor is not None}

    def to(self, dtype: torch.dtype, device: str = "cpu", *, wide: Collection[str] = ("g",)) -> RecurrenceCase:
        """Return a copy in ``dtype`` as new leaves; inputs named in ``wide`` are at least float32."""
        at_least_f32 = torch.promote_types(dtype, torch.float32)
        tensors = {
            name: tensor.detach().to(device, at_least_f32 if name in wide else dtype)
            for name, tensor in self.leaves().items()
        }
        return replace(self, **{name: tensor.requires_grad_() for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True)
class RecurrenceOutput:
    """Output, final states and the gradient of every input for fixed gradients of both results."""

    out: Tensor
    final: Tensor
    grads: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class CaseShape:
    """Sizes of a case: ``lengths`` in tokens of its N sequences, and ``tail`` rows of padding after them.

    In terms of ``RecurrenceCase``, ``heads`` is H, ``groups`` HV / H, ``key`` K and ``value`` V. Without ``state``,
    ``initial`` is None.
    """

    lengths: tuple[int, ...]
    heads: int = 2
    groups: int = 1
    key: int = 8
    value: int = 8
    tail: int = 0
    state: bool = True


def make_case(shape: CaseShape, *, seed: int = 0, decay: float = 1.0, same_keys: bool = False) -> RecurrenceCase:
    """Return random float64 inputs. ``decay``: mean of -g; ``same_keys``: all rows have the same keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    rows, value_heads = sum(shape.lengths) + shape.tail, shape.heads * shape.groups
    keys = normal(1, rows, shape.heads, shape.key)
    if same_keys:
        keys = keys[:, :1].expand(-1, rows, -1, -1) if rows else keys
    bounds = (0, *accumulate(shape.lengths))
    initial = normal(len(shape.lengths), value_heads, shape.key, shape.value) if shape.state else None
    case = RecurrenceCase(
        q=normal(1, rows, shape.heads, shape.key),
        k=keys.clone(),
        v=normal(1, rows, value_heads, shape.value),
        g=-decay * torch.rand(1, rows, value_heads, generator=generator, dtype=torch.float64) * 2,
        beta=torch.rand(1, rows, value_heads, generator=generator, dtype=torch.float64),
        initial=initial,
        cu_seqlens=bounds,
    )
    return case.to(torch.float64)


def recurrence(case: RecurrenceCase) -> tuple[Tensor, Tensor]:
    """Return output [1, T, HV, V] and final states [N, HV, K, V], one token at a time, in the dtype of the inputs."""
    groups, scale = case.v.shape[2] // case.q.shape[2], case.q.shape[-1] ** -0.5
    q, k = (
        (t[0] * torch.rsqrt(t[0].square().sum(-1, keepdim=True) + NORM_EPS)).repeat_interleave(groups, 1)
        for t in (case.q, case.k)
    )
    outputs, finals = [], []
    for n, (start, stop) in enumerate(pairwise(case.cu_seqlens)):
        size = (case.v.shape[2], q.shape[-1], case.v.shape[-1])
        state = case.v.new_zeros(size) if case.initial is None else case.initial[n]
        for t in range(start, stop):
            state = state * case.g[0, t].exp()[:, None, None]
            old_value = torch.einsum("hkv,hk->hv", state, k[t])
            write = case.beta[0, t][:, None] * (case.v[0, t] - old_value)
            state = state + torch.einsum("hk,hv->hkv", k[t], write)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * scale)
        finals.append(state)
    padding = case.v.new_zeros(case.v.shape[1] - case.cu_seqlens[-1], *case.v.shape[2:])
    out = torch.cat([torch.stack(outputs), padding]) if outputs else padding
    return out.unsqueeze(0), torch.stack(finals)


def weights_of(result: tuple[Tensor, Tensor], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return float64 random gradients of both results, determined by ``seed`` and the shapes."""
    generator = torch.Generator().manual_seed(seed)
    out, final = (torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in result)
    return out, final


def answer(
    case: RecurrenceCase, result: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor] | None = None
) -> RecurrenceOutput:
    """Backpropagate ``weights`` through both results; if None, the gradients that ``weights_of`` returns."""
    total = torch.zeros((), dtype=torch.float64, requires_grad=True)  # backward also works for empty inputs
    for part, weight in zip(result, weights or weights_of(result), strict=True):
        total = total + (part.double().cpu() * weight).sum()
    total.backward()
    grads = {name: t.grad if t.grad is not None else torch.zeros_like(t) for name, t in case.leaves().items()}
    return RecurrenceOutput(result[0].detach(), result[1].detach(), grads)


def oracle(case: RecurrenceCase) -> RecurrenceOutput:
    """Return the result of ``recurrence`` for ``case`` in float64."""
    reference_case = case.to(torch.float64)
    return answer(reference_case, recurrence(reference_case))


def of_backend(backend: GatedDeltaRule, case: RecurrenceCase) -> RecurrenceOutput:
    """Return a backend's result for ``case``, in its dtype and on its device."""
    out, final = backend.chunk_rule(
        case.q,
        case.k,
        case.v,
        case.g,
        case.beta,
        cu_seqlens=case.bounds.to(case.q.device),
        cu_seqlens_cpu=case.bounds,
        initial_state=case.initial,
        output_final_state=True,
    )
    assert final is not None
    return answer(case, (out, final))


def errors(actual: RecurrenceOutput, right: RecurrenceOutput) -> dict[str, float]:
    """Return the largest error of each part, relative to its largest right value, or to 0.01 if that is larger."""
    pairs = {"out": (actual.out, right.out), "final": (actual.final, right.final)}
    pairs |= {name: (actual.grads[name], grad) for name, grad in right.grads.items()}
    return {name: _relative(actual_column, true) for name, (actual_column, true) in pairs.items()}


def _relative(actual: Tensor, true: Tensor) -> float:
    assert actual.shape == true.shape
    if not true.numel():
        return 0.0
    difference = (actual.double().cpu() - true.double().cpu()).abs().max()
    return float(difference / true.abs().max().clamp_min(1e-2))


def conv_reference(x: Tensor, weight: Tensor, cu_seqlens: tuple[int, ...], halo: Tensor | None, silu: bool) -> Tensor:
    """Return the output [1, T, D]: for each token, the weighted sum over its window, then SiLU if ``silu``.

    ``halo`` [N, W-1, D] contains the rows before each sequence; None: zeros.
    """
    width, rows = weight.shape[1], []
    for n, (start, stop) in enumerate(pairwise(cu_seqlens)):
        history = x.new_zeros(width - 1, x.shape[2]) if halo is None else halo[n]
        inputs = torch.cat([history, x[0, start:stop]])
        rows += [(inputs[t : t + width] * weight.T).sum(0) for t in range(stop - start)]
    rows = [F.silu(row) if silu else row for row in rows]
    padding = [x.new_zeros(x.shape[2])] * (x.shape[1] - cu_seqlens[-1])
    return torch.stack([*rows, *padding]).unsqueeze(0) if rows or padding else torch.zeros_like(x)


@dataclass(frozen=True, slots=True)
class ConvCase:
    """Inputs of one convolution."""

    x: Tensor  # [1, T, D]
    weight: Tensor  # [D, W]
    halo: Tensor | None  # [N, W-1, D]
    cu_seqlens: tuple[int, ...]

    def leaves(self) -> list[Tensor]:
        """Return every differentiable input."""
        return [t for t in (self.x, self.weight, self.halo) if t is not None]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> ConvCase:
        """Return a copy in ``dtype`` as new leaves."""
        x, weight, halo = (
            None if t is None else t.detach().to(device, dtype).requires_grad_()
            for t in (self.x, self.weight, self.halo)
        )
        assert x is not None and weight is not None
        return ConvCase(x, weight, halo, self.cu_seqlens)


def make_conv(
    lengths: Sequence[int], width: int, *, tail: int = 0, halo: bool = False, channels: int = 3, seed: int = 0
) -> ConvCase:
    """Return random float64 inputs with ``tail`` rows of padding."""
    generator = torch.Generator().manual_seed(seed)
    bounds = (0, *accumulate(lengths))

    def leaf(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

    history = leaf(len(lengths), width - 1, channels) if halo else None
    return ConvCase(leaf(1, bounds[-1] + tail, channels), leaf(channels, width), history, bounds)


def convolve(backend: GDNBackend, case: ConvCase, *, silu: bool = True) -> Tensor:
    """Return a backend's result for ``case``."""
    bounds = torch.tensor(case.cu_seqlens, dtype=torch.int32)
    return backend.causal_conv(
        case.x,
        case.weight,
        cu_seqlens=bounds.to(case.x.device),
        cu_seqlens_cpu=bounds,
        activation="silu" if silu else None,
        halo=case.halo,
    )


def conv_errors(backend: GDNBackend, case: ConvCase, dtype: torch.dtype, *, silu: bool = True) -> list[float]:
    """Return the largest errors in ``dtype`` of the output and of each input's gradient, relative as in ``errors``.

    They are in the order output, x, weight, halo.
    """
    cast, right = case.to(dtype, str(case.x.device)), case.to(torch.float64)
    reference = conv_reference(right.x, right.weight, right.cu_seqlens, right.halo, silu)
    actual, true = _with_gradients(convolve(backend, cast, silu=silu), cast), _with_gradients(reference, right)
    return [_relative(a, b) for a, b in zip(actual, true, strict=True)]


def _with_gradients(out: Tensor, case: ConvCase) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    total = (out.double().cpu() * weights).sum() + torch.zeros((), requires_grad=True)
    return [out.detach(), *torch.autograd.grad(total, case.leaves(), allow_unused=True, materialize_grads=True)]
