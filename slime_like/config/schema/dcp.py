"""Conditions that decode context parallelism (DCP) imposes on an engine, shared by the config rules and the engine's plugin."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_BACKENDS: Mapping[str, str] = {"cpu": "slime_like_cpu", "cuda": "triton"}
"""Default attention backend of an engine with DCP, by device. For latent attention on GPUs, ``LATENT_BACKENDS[0]``."""
LATENT_BACKENDS = ("flashinfer", "trtllm_mla", "cutedsl_mla")
"""SGLang's attention backends that serve latent attention with DCP on GPUs, the default first."""
SHARDED_FLASHINFER = "flashinfer_dcp"
SHARDED_BACKENDS: Mapping[str, Mapping[str, str]] = {"cpu": {}, "cuda": {"flashinfer": SHARDED_FLASHINFER}}
"""Backends of ``slime_like_plugins.dcp``, by device and by the attention backend of SGLang to which they add DCP."""
ALL_TO_ALL_BACKENDS = ("slime_like_cpu", SHARDED_FLASHINFER, *LATENT_BACKENDS)
"""Attention backends that can exchange by ``a2a``; SGLang's triton attention always uses ``ag_rs``."""
_IGNORES = (
    "it stores and reads the KV cache as if each rank held all tokens, and SGLang does not reject this combination"
)
_MLA = "it is for models with multi-head latent attention"
BACKEND_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""Fields of ServerArgs with names of attention backends; the second and third take precedence over the first."""
UNSUPPORTED_BACKENDS: Mapping[str, str] = {
    "fa3": _IGNORES,
    "fa4": _IGNORES,
    "flashinfer": _IGNORES,
    "flex_attention": _IGNORES,
    "intel_amx": _IGNORES,
    "torch_native": _IGNORES,
    "trtllm_mha": _IGNORES,
    "slime_like_exact": "its sums have a fixed order over all tokens of a sequence",
    "cutedsl_mla": _MLA,
    "flashmla": "it passes the lengths of complete sequences to its kernel, not of a rank's part",
    "trtllm_mla": _MLA,
}
"""Attention backend -> reason why it cannot serve with DCP. A backend that is neither supported nor listed is untested."""

UNSUPPORTED_FIELDS: Mapping[str, tuple[object, str]] = {
    "attn_cp_size": (1, "its ranks and DCP's would both split a sequence"),
    "cuda_graph_backend_prefill": ("disabled", "SGLang captures prefills without the layout of a sharded cache"),
    "disaggregation_decode_retraction_backup": ("cpu_tensor", "SGLang does not support a backup on the host with DCP"),
    "disaggregation_mode": ("null", "prefill and decode run in the same engine here"),
    "dllm_algorithm": (
        None,
        "SGLang's attention of diffusion language models does not read a sharded KV cache",
    ),
    "enable_deterministic_inference": (False, "SGLang's deterministic kernels are not used with DCP"),
    "enable_flexkv": (False, "an external cache stores rows of a KV cache that is not sharded"),
    "enable_hierarchical_cache": (
        False,
        "not tested; SGLang copies a sharded cache to the host only for latent attention",
    ),
    "enable_hisparse": (False, "SGLang's host pool does not translate indices of a sharded cache"),
    "enable_kv_cache_sharding": (False, "it and DCP would both split the KV cache over ranks"),
    "enable_lmcache": (False, "an external cache stores rows of a KV cache that is not sharded"),
    "enable_mis": (False, "multi-item scoring has custom masks, which attention over a sharded cache does not apply"),
    "enable_pdmux": (False, "prefill and decode would exchange on the group at the same time, which was not tested"),
    "enable_prefill_cp": (False, "SGLang does not support both"),
    "enable_two_batch_overlap": (False, "exchanges of two batches at the same time were not tested"),
    "enable_unified_cache_external_linker": (False, "an external cache stores rows of a KV cache that is not sharded"),
    "enable_unified_memory": (False, "not tested; SGLang supports it with DCP only for latent attention"),
    "kv_cache_dtype": ("auto", "SGLang does not write blocks of quantised keys and values to a sharded cache"),
    "speculative_algorithm": (None, "the draft's and the target's KV caches would have different layouts"),
}
"""Map from fields of ServerArgs to the value that DCP requires and the reason."""
QUANTISED = ("fp4", "mxfp")  # prefixes of the KV cache's dtypes that are rejected
PAGED_VARIABLE = "SGLANG_FLASHINFER_USE_PAGED"
"""Environment variable that makes FlashInfer read new tokens from the cache, where each rank has only a part of them."""


def field_obstacle(field: str, value: object) -> str | None:
    """Return why DCP rules out ``value`` for a field of ServerArgs; None if it does not.

    A ``value`` of None means SGLang's default.
    """
    if field not in UNSUPPORTED_FIELDS:
        return None
    required, reason = UNSUPPORTED_FIELDS[field]
    if field == "kv_cache_dtype":
        return reason if str(value).startswith(QUANTISED) else None
    return None if value in (required, None, False) else reason


def replicated_q_obstacle(
    device: str,
    exchange: str,
    *,
    output_gates: bool = False,
    projection_norms: bool = False,
    latent: bool = False,
) -> str | None:
    """Return why an engine cannot replicate query projections within a DCP group, or None if it can.

    ``exchange`` is ``rollout.dcp_comm``. ``output_gates``: the model's query projection also computes output gates.
    ``projection_norms``: the model normalizes queries over all heads, not each head by itself. ``latent``: it has multi-head
    latent attention.
    """
    if latent:
        return (
            "SGLang 0.5.23 copies projections of latent attention when an engine starts, and a weight push would not update the "
            "copies"
        )
    if device != "cpu":
        return "on a GPU, SGLang 0.5.23 replicates query projections only in models with multi-head latent attention"
    if exchange == "ag_rs":
        return "SGLang refuses it with the exchange ag_rs"
    if projection_norms:
        return "the query norm of this model is over the heads of all ranks of an engine, not over each head"
    return "the query projection of this model also computes output gates" if output_gates else None


def default_backend(device: str, *, latent: bool = False) -> str:
    """Return the attention backend that an engine on ``device`` uses with DCP if the config names none."""
    return LATENT_BACKENDS[0] if latent and device == "cuda" else DEFAULT_BACKENDS[device]


def backend_obstacle(backend: str, device: str, *, latent: bool = False) -> str | None:
    """Return why an engine on ``device`` cannot serve with DCP and the attention ``backend``, or None if it can.

    ``backend`` is the name that ``sharded_backend`` returns, not the one in the config.
    """
    sharding_backends = (DEFAULT_BACKENDS[device], *SHARDED_BACKENDS[device].values())
    if backend in (LATENT_BACKENDS if latent and device == "cuda" else sharding_backends):
        return None
    attention = "latent attention and DCP" if latent else "DCP"
    return UNSUPPORTED_BACKENDS.get(backend, f"it was not tested with {attention} on {device}")


def sharded_backend(backend: str, device: str, *, latent: bool = False) -> str:
    """Return the backend that an engine with DCP on ``device`` uses for the attention ``backend`` of the config.

    Backends for latent attention keep their name, because SGLang itself shards a cache of latents.
    """
    return backend if latent else SHARDED_BACKENDS[device].get(backend, backend)


def kv_head_obstacle(tp: int, dcp: int, num_kv_heads: int) -> str | None:
    """Return why ``tp`` attention ranks with ``num_kv_heads`` cannot form DCP groups of ``dcp`` ranks, or None if they can.

    All ranks of a DCP group must hold the same KV head, so ``tp`` must be a multiple of ``num_kv_heads``, and ``dcp`` must
    divide the number of ranks that share a head, which must be at least 2. With a larger dcp, each rank would hold more KV
    heads, which would use up the memory that sharding the tokens saves.
    """
    if num_kv_heads >= tp:
        return (
            f"each of the {tp} attention ranks already stores different KV heads (the model has {num_kv_heads}), so there are no "
            f"copies that sharding the tokens could save; set rollout.dcp=1 (engines of rollout.tp={num_kv_heads * dcp} ranks would have {dcp} copies)"
        )
    copies = tp // num_kv_heads
    if copies * num_kv_heads == tp and copies % dcp == 0:
        return None
    useful = [str(size) for size in range(1, copies + 1) if copies % size == 0]
    return (
        f"{tp} attention ranks store {num_kv_heads} KV heads, so each head is stored {copies} times, and rollout.dcp must divide "
        f"{copies}; set rollout.dcp={' or '.join(useful)}"
    )
