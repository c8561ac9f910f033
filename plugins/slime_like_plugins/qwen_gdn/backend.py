"""Interface between the Gated DeltaNet layer and its kernels: one class per backend, chosen by ``select``."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

NORM_EPS = 1e-6
"""Added to the sum of squares when queries and keys are normalised; what the models were trained with."""


class RangeRule(Protocol):
    """The gated delta rule over a stream of packed sequences of which each rank of a group holds consecutive tokens."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """This rank's L tokens, as ``GDNBackend.chunk_rule`` takes them -> [1, L, HV, V]; states and their gradients cross
        ranks in collectives of the group, one forward and one backward."""
        ...


class GDNBackend(Protocol):
    """Kernels of one backend. Axes: T packed tokens, N sequences, H key heads, HV value heads, K, V head sizes.

    ``cu_seqlens`` [N+1] are the starts of the sequences and their common end, on the device of the data, and
    ``cu_seqlens_cpu`` the same numbers on the host, so that no call waits for the device. Sequences may be empty; rows
    from ``cu_seqlens[-1]`` on are padding: their outputs and gradients are 0 for any content.
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
        """The gated delta rule (Yang et al., "Gated Delta Networks", 2024), over packed sequences::

            S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,   o_t = S_t^T q_t / sqrt(K)

        ``q``, ``k`` [1, T, H, K] are normalised to length 1 inside; ``v`` [1, T, HV, V] with HV a multiple of H: value
        head i reads key head i // (HV / H). ``g`` [1, T, HV] is the logarithm of the decay (<= 0, float32), ``beta``
        [1, T, HV]. ``initial_state`` [N, HV, K, V], zero where None. Returns the output [1, T, HV, V] in ``v``'s dtype
        and, if asked for, the states after each sequence [N, HV, K, V], in float32 (float64 if the inputs are); the
        state of an empty sequence is its initial one. Differentiable in every tensor, through both results.
        """
        ...

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
        """Depthwise causal convolution over time, sequence by sequence, then ``activation`` (silu or None).

        ``x`` [1, T, D]; ``weight`` [D, W], whose last column meets the current token. ``halo`` [N, W-1, D] are the
        inputs before each sequence (oldest first), zero where None. Returns [1, T, D]. Differentiable in all three.
        """
        ...

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> RangeRule | None:
        """The backend's own way of passing states on over the ranks of ``group``; None: it has none that is used.

        The bounds are those of the whole stream, whose P tokens the ranks share in equal parts. Called once per micro-batch.
        """
        ...

    def kernels(self) -> str:
        """Return the kernels that actually run, with versions, for the log."""
        ...
