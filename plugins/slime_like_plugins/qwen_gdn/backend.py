"""Interface between the Gated DeltaNet layer and its kernels. Each backend is a class; ``select`` chooses one."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

NORM_EPS = 1e-6
"""Epsilon added to the sum of squares in the normalisation of queries and keys, as in the models' own code."""


class RangeRule(Protocol):
    """Gated delta rule over a stream of packed sequences, of which each rank of a group holds consecutive tokens."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return the output [1, L, HV, V] for this rank's L tokens. The arguments are those of ``GDNBackend.chunk_rule``.

        The ranks exchange states in one collective in forward, and their gradients in one collective in backward.
        """
        ...


class GatedDeltaRule(Protocol):
    """Gated delta rule over packed sequences. Axes: T rows, N sequences, H key heads, HV value heads, K, V head sizes.

    ``cu_seqlens`` [N+1] holds the starts of the sequences and the end of the last one, on the device of the data;
    ``cu_seqlens_cpu`` holds the same numbers on the host, so that no call waits for the device. Sequences may be empty. Rows
    from ``cu_seqlens[-1]`` on are padding: their outputs and gradients are 0, whatever they contain.
    """

    name: str

    def chunk_rule(  # noqa: PLR0913  (a kernel's argument list)
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
        """Apply the gated delta rule (Yang et al., "Gated Delta Networks", 2024) to packed sequences::

            S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,   o_t = S_t^T q_t / sqrt(K)

        ``q``, ``k`` [1, T, H, K] are normalised to length 1 here; ``v`` is [1, T, HV, V] with HV a multiple of H, and value
        head i reads key head i // (HV / H). ``g`` [1, T, HV] is the logarithm of the decay (<= 0, at least float32), ``beta``
        [1, T, HV] the write strength. ``initial_state`` [N, HV, K, V] is zero by default. Return the output [1, T, HV, V] in
        ``v``'s dtype, and the states after each sequence [N, HV, K, V] in float32 (float64 if the inputs are), or None
        without ``output_final_state``; the final state of an empty sequence is its initial state. Both results are
        differentiable with respect to every tensor.
        """
        ...

    def kernels(self) -> str:
        """Return the names and versions of the kernels, for the log."""
        ...


class GDNBackend(GatedDeltaRule, Protocol):
    """All kernels of one backend."""

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
        """Apply a depthwise causal convolution over time to each sequence, then ``activation`` (silu or None).

        ``x`` is [1, T, D]; the last column of ``weight`` [D, W] multiplies the current token. ``halo`` [N, W-1, D] holds the
        inputs before each sequence, oldest first (zero by default). Return [1, T, D], differentiable with respect to ``x``,
        ``weight`` and ``halo``.
        """
        ...

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> RangeRule | None:
        """Return the backend's own rule for a stream that is split over the ranks of ``group``.

        ``cu_seqlens`` are the bounds of the entire stream, whose P tokens are split evenly over the ranks. If the result is
        None, ``state_passing`` exchanges the states between calls of ``chunk_rule``. ``ranges.range_of`` calls this method
        only if a border between ranks cuts a sequence, and caches the result for all layers.
        """
        ...
