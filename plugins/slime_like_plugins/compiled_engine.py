"""Call SGLang's Triton functions with an engine's shapes: ``python -m slime_like_plugins.compiled_engine REQUEST RESULT``.

The process has a phantom GPU (``slime_like.phantom``), on which a call compiles its kernels and computes nothing. A function
that raises an exception, for example because its package is not installed, is listed in RESULT with its error. SGLang's other
kernels are precompiled (``sgl-kernel``) or compiled by nvcc at their first use; of these, the activation is compiled if nvcc is
installed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_like.config.rules.gdn_runtime import has_nvcc
from slime_like.phantom.autotuning import use_first_configs
from slime_like.rollout.engine.sglang_imports import sglang_imports

TOKENS, REQUESTS, SLOTS = 256, 4, 1024
KV_SPLITS = 8
OPS = "sglang.kernels.ops"
type Sizes = Mapping[str, Any]


def main(request: Path, result: Path) -> int:
    """Call the functions of the engine that ``request`` describes, and write a list of ``call`` results to ``result``.

    Return the exit code.
    """
    arguments: dict[str, Any] = json.loads(request.read_text(encoding="utf-8"))
    if arguments.get("first_configs"):
        use_first_configs()
    with contextlib.suppress(ImportError), sglang_imports():  # ``call`` reports the functions that need it
        importlib.import_module("sglang")
    result.write_text(
        json.dumps([call(f, arguments["shape"]) for f in functions(arguments["shape"])]), encoding="utf-8"
    )
    return 0


def functions(sizes: Sizes) -> list[Callable[[Sizes], None]]:
    """Return ``request_pool`` and the other functions whose kernels the engine may use.

    The functions of attention are left out if it is latent or the settings name a backend other than Triton; those of Gated
    DeltaNet, if the model has none; the activation, if nvcc is not installed.
    """
    out: list[Callable[[Sizes], None]] = [request_pool]
    if not sizes["latent"] and sizes["attention_backend"] in ("", "triton"):  # "": the default of some models and GPUs
        out += [attention_prefill, attention_decode]
    if sizes["gdn"]:
        out += [convolution, gated_delta_prefill, gated_delta_decode]
    return [*out, activation] if has_nvcc() else out


def activation(sizes: Sizes) -> None:
    """Load SGLang's module with the activation of an MLP.

    If SGLang's cache (SGLANG_JIT_CACHE_DIR, by default ~/.cache/sglang/jit) lacks it, nvcc compiles it, which takes minutes.
    """
    ops: Any = importlib.import_module(f"{OPS}.activation.activation")
    ops.activation_module(getattr(torch, sizes["dtype"]))


def call(function: Callable[[Sizes], None], sizes: Sizes) -> dict[str, Any]:
    """Call ``function``. Return its name, the seconds it took, and its error or ""."""
    start, error = time.monotonic(), ""
    try:
        function(sizes)
    except Exception as failure:  # noqa: BLE001  (fault boundary: every function is listed)
        error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
    return {"name": function.__name__, "seconds": round(time.monotonic() - start, 1), "error": error}


def request_pool(sizes: Sizes) -> None:
    """Write a batch's slots to the request table, and read the last slot of each request."""
    del sizes
    ops: Any = importlib.import_module(f"{OPS}.memory.common")
    table, rows = _integers(REQUESTS, SLOTS, dtype=torch.int32), _integers(REQUESTS)
    lengths, prefixes = _integers(REQUESTS), _integers(REQUESTS, dtype=torch.uint64)
    ops.write_req_to_token_pool_triton[(REQUESTS,)](
        table, rows, prefixes, lengths, lengths, lengths, _integers(TOKENS), table.shape[1]
    )
    ops.get_last_loc_triton(table, rows, lengths)


def attention_prefill(sizes: Sizes) -> None:
    """Compute attention of new tokens to a prefix and to each other."""
    ops: Any = importlib.import_module(f"{OPS}.attention.extend_attention")
    q, k, v, cached = _attention_tensors(sizes, TOKENS)
    bounds, indices = _integers(REQUESTS + 1, dtype=torch.int32), _integers(SLOTS)
    ops.extend_attention_fwd(
        q, k, v, torch.empty_like(q), cached, cached, bounds, bounds, indices, None, True, None, TOKENS, 1.0, 1.0
    )


def attention_decode(sizes: Sizes) -> None:
    """Compute attention of one token per request to the request's cached tokens."""
    ops: Any = importlib.import_module(f"{OPS}.attention.decode_attention")
    q, _, _, cached = _attention_tensors(sizes, REQUESTS)
    heads, dim = sizes["num_heads"], sizes["head_dim"]
    partial = torch.empty(REQUESTS, heads, KV_SPLITS, dim, device="cuda")
    maxima = torch.empty(REQUESTS, heads, KV_SPLITS, device="cuda")
    bounds, indices, splits = (
        _integers(REQUESTS + 1, dtype=torch.int32),
        _integers(SLOTS),
        _integers(REQUESTS, dtype=torch.int32),
    )
    ops.decode_attention_fwd(
        q, cached, cached, torch.empty_like(q), bounds, indices, partial, maxima, splits, KV_SPLITS, dim**-0.5, 1.0, 1.0
    )


def convolution(sizes: Sizes) -> None:
    """Convolve new tokens of several requests, then one token per request."""
    ops: Any = importlib.import_module(f"{OPS}.mamba.causal_conv1d_triton")
    channels, width = _channels(sizes), sizes["gdn"][4]
    weight, states = _half(sizes, channels, width), _half(sizes, SLOTS, width - 1, channels).transpose(1, 2)
    slots = _integers(REQUESTS, dtype=torch.int32)
    lengths = [TOKENS // REQUESTS] * REQUESTS
    starts = torch.arange(0, TOKENS + 1, TOKENS // REQUESTS, dtype=torch.int32, device="cuda")
    ops.causal_conv1d_fn(
        _half(sizes, TOKENS, channels).transpose(0, 1),
        weight,
        None,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.ones(REQUESTS, dtype=torch.bool, device="cuda"),
        cache_indices=slots,
        query_start_loc=starts,
        seq_lens_cpu=lengths,
    )
    ops.causal_conv1d_update(_half(sizes, REQUESTS, channels), states, weight, None, "silu", conv_state_indices=slots)


def gated_delta_prefill(sizes: Sizes) -> None:
    """Apply the chunked gated delta rule to new tokens of several requests."""
    ops: Any = importlib.import_module(f"{OPS}.attention.fla.chunk")
    key_heads, value_heads, key_dim, value_dim, _ = sizes["gdn"]
    q, k = (_half(sizes, 1, TOKENS, key_heads, key_dim) for _ in range(2))
    gates = torch.zeros(1, TOKENS, value_heads, device="cuda")
    ops.chunk_gated_delta_rule(
        q,
        k,
        _half(sizes, 1, TOKENS, value_heads, value_dim),
        gates,
        gates.to(q.dtype),
        initial_state=torch.zeros(SLOTS, value_heads, value_dim, key_dim, device="cuda"),
        initial_state_indices=_integers(REQUESTS, dtype=torch.int32),
        cu_seqlens=torch.arange(0, TOKENS + 1, TOKENS // REQUESTS, dtype=torch.int32, device="cuda"),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )


def gated_delta_decode(sizes: Sizes) -> None:
    """Apply the recurrent gated delta rule to one token of each request."""
    ops: Any = importlib.import_module(f"{OPS}.attention.fla.fused_recurrent")
    _, value_heads, key_dim, value_dim, _ = sizes["gdn"]
    a, b = (_half(sizes, REQUESTS, value_heads) for _ in range(2))
    ops.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=_half(sizes, REQUESTS, _channels(sizes)),
        a=a,
        b=b,
        A_log=torch.zeros(value_heads, device="cuda"),
        dt_bias=torch.zeros(value_heads, device="cuda", dtype=a.dtype),
        scale=key_dim**-0.5,
        initial_state=torch.zeros(SLOTS, value_heads, value_dim, key_dim, device="cuda"),
        out=_half(sizes, REQUESTS, 1, value_heads, value_dim),
        ssm_state_indices=_integers(REQUESTS, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )


def _attention_tensors(sizes: Sizes, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values of new tokens, and a buffer of cached keys or values."""
    q = _half(sizes, num_tokens, sizes["num_heads"], sizes["head_dim"])
    k, v = (_half(sizes, num_tokens, sizes["num_kv_heads"], sizes["head_dim"]) for _ in range(2))
    return q, k, v, _half(sizes, SLOTS, sizes["num_kv_heads"], sizes["head_dim"])


def _channels(sizes: Sizes) -> int:
    key_heads, value_heads, key_dim, value_dim, _ = sizes["gdn"]
    return 2 * key_heads * key_dim + value_heads * value_dim


def _half(sizes: Sizes, *shape: int) -> Tensor:
    """Return a zero tensor on the GPU in the engine's dtype."""
    dtype: torch.dtype = getattr(torch, sizes["dtype"])
    return torch.zeros(shape, dtype=dtype, device="cuda")


def _integers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
