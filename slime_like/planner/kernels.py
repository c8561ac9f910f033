"""Number of kernels that SGLang launches in the layers of a decode step."""

from __future__ import annotations

from slime_like.planner.shapes import ATTENTION, LATENT, RECURRENT, ModelShape

MIXERS = {
    # norm, projection, 2 head norms, rotary embedding, cache write, attention, merge of its parts, output, all-reduce
    ATTENTION: 10,
    # norm, down, 2 norms, query up, absorbed keys, rotary embedding, concatenation, cache write, attention, merge of its
    # parts, absorbed values, output, all-reduce
    LATENT: 14,
    # norm, 2 projections, convolution, gates, delta rule, gated norm, output, all-reduce
    RECURRENT: 9,
}
DENSE = 5  # norm, gate and up, activation, down, all-reduce
# norm, router, top-k, 2 that sort tokens by expert, gate and up, activation, down, sum over experts, all-reduce
EXPERTS = 10
SHARED = 4  # gate and up, activation, down, addition
QUANTIZED = {ATTENTION: 2, LATENT: 4, RECURRENT: 2, "mlp": 2}
"""Mixer or MLP -> number of its linear layers whose inputs an FP8 model quantizes, each in a kernel of its own."""
EXCHANGE = 3  # kernels of a DCP exchange: queries, log-sum-exp, outputs


def num_kernels(shape: ModelShape, *, fp8: bool) -> int:
    """Return the number of kernels of all layers in a decode step."""
    return sum(_layer_kernels(shape, layer.mixer, fp8=fp8, sparse=layer.sparse) for layer in shape.layers)


def _layer_kernels(shape: ModelShape, mixer: str, *, fp8: bool, sparse: bool) -> int:
    kernels = MIXERS[mixer] + fp8 * QUANTIZED[mixer]
    if not sparse:
        return kernels + DENSE + fp8 * QUANTIZED["mlp"]
    has_shared_experts = shape.experts is not None and shape.experts.shared_width > 0
    return kernels + EXPERTS + has_shared_experts * SHARED + fp8 * QUANTIZED["mlp"] * (1 + has_shared_experts)
