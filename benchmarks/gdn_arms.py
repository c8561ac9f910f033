"""The arms of ``benchmarks/gdn.py`` and their measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.gdn import GDNConfig
from slime_like.errors import ConfigError
from slime_like_plugins.qwen_gdn.backend import GatedDeltaRule
from slime_like_plugins.qwen_gdn.select import resolve

MIB = 2**20


@dataclass(frozen=True, slots=True)
class GdnShape:
    """Shape of a case: lengths of its sequences (T tokens in total), H key heads and HV value heads of size D."""

    lengths: tuple[int, ...]
    heads: int
    value_heads: int
    dim: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens T."""
        return sum(self.lengths)

    def __str__(self) -> str:
        packed = f"{len(self.lengths)} x {self.lengths[0]}" if len(self.lengths) > 1 else str(self.tokens)
        return f"{packed}, {self.heads}/{self.value_heads} x {self.dim}"


@dataclass(frozen=True, slots=True)
class GdnArm:
    """Implementation of the gated delta rule. If ``packs`` is True, one call may contain several sequences."""

    name: str
    kernels: str
    rule: GatedDeltaRule
    packs: bool = True
    refused_dims: frozenset[int] = frozenset()  # sizes of heads, among those of the shapes, that it cannot compute

    def computes(self, shape: GdnShape) -> bool:
        """Return True if the arm can compute ``shape``."""
        return shape.dim not in self.refused_dims and (self.packs or len(shape.lengths) == 1)


@dataclass(frozen=True, slots=True)
class Timing:
    """Timing of one arm on one shape: seconds of its first call, peak memory in MiB, and seconds of each round."""

    cold: float
    peak: float
    forward: list[float] = field(default_factory=list)
    forward_backward: list[float] = field(default_factory=list)


def ratio(base: Sequence[float], arm: Sequence[float]) -> float:
    """Return the median over rounds of ``base`` / ``arm``. Other work slows both arms of a round and changes the ratio little."""
    return statistics.median(b / a for b, a in zip(base, arm, strict=True))


class TransformersFallback:
    """Gated delta rule as transformers computes it without fla. It ignores cu_seqlens, so it gets one sequence only."""

    name = "hf"

    def __init__(self) -> None:
        from transformers import __version__
        from transformers.models.qwen3_next import modeling_qwen3_next

        function = modeling_qwen3_next.torch_chunk_gated_delta_rule
        self._rule = getattr(function, "__wrapped__", function)  # the wrapper calls fla if that is installed
        self._version = __version__

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
        """Apply the rule to a single sequence. Key heads are repeated for their value heads, as in transformers' layer."""
        assert len(cu_seqlens_cpu) == 2
        q, k = (t.repeat_interleave(v.shape[2] // q.shape[2], 2) for t in (q, k))
        return self._rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
        )

    def kernels(self) -> str:
        """Return the name of the function and the version of transformers."""
        return f"transformers {self._version}: torch_chunk_gated_delta_rule"


def make_arms(
    names: Sequence[str], device: str, dtype: str, shapes: Sequence[GdnShape]
) -> tuple[list[GdnArm], dict[str, str]]:
    """Return the arms that can compute one of ``shapes`` on this machine, and the reason for each arm that cannot."""
    arms, missing = [], {}
    for name in names:
        rules, refused = _rules(name, device, dtype, {shape.dim for shape in shapes})
        if not rules:
            missing[name] = next(iter(refused.values()))
            continue
        arm = GdnArm(name, rules[0].kernels(), rules[0], packs=name != "hf", refused_dims=frozenset(refused))
        if any(map(arm.computes, shapes)):
            arms.append(arm)
        else:
            missing[name] = "it computes single sequences only, and all --shapes are packed"
    return arms, missing


def _rules(name: str, device: str, dtype: str, dims: Collection[int]) -> tuple[list[GatedDeltaRule], dict[int, str]]:
    """Return the rule of arm ``name`` for each size of heads that it can compute, and the reason for each other size."""
    if name == "hf":
        return [TransformersFallback()], {}
    rules, refused = [], {}
    for dim in sorted(dims):
        try:
            shape = GDNShape(key_heads=1, value_heads=1, key_dim=dim, value_dim=dim, conv_width=4)
            rules.append(resolve(GDNConfig(backend=name), device, dtype, shape))
        except ConfigError as error:
            refused[dim] = str(error)
    return rules, refused


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One arm on one shape, which can be run repeatedly."""

    arm: GdnArm
    inputs: tuple[Tensor, ...]
    bounds: Tensor
    bounds_cpu: Tensor
    dout: Tensor

    def forward(self) -> Tensor:
        """Return the output [1, T, HV, D], without gradient."""
        with torch.no_grad():
            return self._run()

    def forward_backward(self) -> None:
        """Run forward and backward and drop the gradients."""
        torch.autograd.grad(self._run(), self.inputs, self.dout)

    def _run(self) -> Tensor:
        q, k, v, g, beta = self.inputs
        return self.arm.rule.chunk_rule(
            q, k, v, g, beta, cu_seqlens=self.bounds, cu_seqlens_cpu=self.bounds_cpu
        )[0]  # fmt: skip


def make_call(arm: GdnArm, shape: GdnShape, device: str, dtype: torch.dtype) -> TimedCall:
    """Return a call with random inputs, the same for every arm; g and beta in float32, as the layer passes them."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype).requires_grad_()

    keys, values = (1, shape.tokens, shape.heads, shape.dim), (1, shape.tokens, shape.value_heads, shape.dim)
    q, k, v = normal(*keys), normal(*keys), normal(*values)
    g = (-torch.rand(values[:3], generator=generator) * 0.2).to(device).requires_grad_()
    beta = torch.rand(values[:3], generator=generator).to(device).requires_grad_()
    bounds = torch.tensor([0, *accumulate(shape.lengths)], dtype=torch.int32)
    return TimedCall(arm, (q, k, v, g, beta), bounds.to(device), bounds, torch.ones_like(v))


def seconds(run: Callable[[], object], device: str) -> float:
    """Return the seconds of ``run``: device time on a GPU; on a CPU the CPU time, which a busy machine disturbs least."""
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop) / 1e3
    start = time.process_time()
    run()
    return time.process_time() - start


def cold_seconds(run: Callable[[], object], device: str) -> float:
    """Return the wall time of one call, including compilation and autotuning if it is the first one."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(run: Callable[[], object], device: str) -> float:
    """Return the MiB by which one call raises memory at its peak: GPU memory, or on a CPU what torch's profiler records."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - bytes_before) / MIB
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events: list[Any] = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    steps = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(steps), default=0) / MIB


def measure(arms: Sequence[GdnArm], shape: GdnShape, device: str, dtype: torch.dtype, rounds: int) -> dict[str, Timing]:
    """Return timings by arm, for the arms that support the shape. Peak memory is measured in a call without timing."""
    calls = {arm.name: make_call(arm, shape, device, dtype) for arm in arms if arm.computes(shape)}
    timings = {
        name: Timing(cold_seconds(call.forward_backward, device), peak_mib(call.forward_backward, device))
        for name, call in calls.items()
    }
    for _ in range(rounds):
        for name, call in calls.items():
            timings[name].forward.append(seconds(call.forward, device))
            timings[name].forward_backward.append(seconds(call.forward_backward, device))
    return timings


def kernels_seen(run: Callable[[], object], device: str, max_names: int = 4) -> list[str]:
    """Return the names of a call's most expensive kernels, as measured by torch's profiler.

    At most ``max_names`` kernels of the delta rule are followed by at most ``max_names`` of all kernels, without repetition.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        run()
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
    names = [event.key for event in events if getattr(event, key) > 0]
    chunk_kernels = [
        name for name in names if any(mark in name.lower() for mark in ("chunkrule", "chunk_", "triangular"))
    ]
    return list(dict.fromkeys([*chunk_kernels[:max_names], *names[:max_names]]))
