"""Constants of the planner, each with its source. Two are fitted; ``FITTED`` lists them."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Constant:
    """Constant of the planner; ``fitted_on`` names the published number that a fitted constant reproduces."""

    name: str
    value: float
    unit: str
    source: str
    fitted_on: str = ""


CUDA_CONTEXT = Constant(
    "CUDA context",
    0.5 * GIB,
    "bytes per process",
    "assumption: about the memory that nvidia-smi shows for a process on Hopper that has loaded torch's kernels; not measured here",
)
NCCL_BUFFERS = Constant(
    "communicator buffers",
    256 * MIB,
    "bytes per process group of more than one GPU",
    "NCCL: 4 MiB (NCCL_BUFFSIZE default) * 2 directions * up to 32 channels",
)
SYMMETRIC_MEMORY = Constant(
    "symmetric memory",
    4 * GIB,
    "bytes per engine rank with rollout.symmetric_memory",
    "SGLang 0.5.23, arg_groups/memory_hook.py: default of SGLANG_SYMM_MEM_PREALLOC_GB_SIZE",
)
FLASHINFER_WORKSPACE = Constant(
    "FlashInfer's workspace",
    GIB // 2,
    "bytes per engine rank with an attention backend of FlashInfer",
    "SGLang 0.5.23, flashinfer_backend.py: 512 MiB for Qwen models, at most as much for others; 2 GiB with run.deterministic; trtllm_mha_backend.py: 512 MiB more",
)
ALLOCATOR = Constant(
    "allocator overhead",
    1.07,
    "reserved / allocated bytes",
    "torch's CUDA caching allocator in seven traced layouts of this trainer: 1.05 to 1.12, mean 1.07 (docs/planner.md)",
)
PINNED = Constant(
    "pinned memory",
    1.44,
    "reserved / requested bytes",
    "parts of tensors that megatron cuts: torch rounds each pinned buffer up to a power of two (CachingHostAllocator), 1 / ln 2 = 1.44 "
    "on average over sizes",
)
PINNED_BLOCKS = Constant(
    "blocks of pinned memory",
    1.1,
    "reserved / requested bytes",
    "tensors that share pinned blocks of at most 256 MiB (host_weights.py), rounded up to a power of two: 1.10 in a trace of "
    "qwen3_4b_gsm8k (docs/planner.md)",
)
_RESERVE = "SGLang 0.5.23, arg_groups/memory_hook.py"
SGLANG_META = Constant("engine metadata", 512 * MIB, "bytes", _RESERVE)
SGLANG_PREFILL = Constant("prefill reserve", 1.5 * MIB, "bytes per token of a prefill chunk", _RESERVE)
SGLANG_PARALLEL = Constant("parallel reserve", 128 * MIB, "bytes per tensor parallel rank", _RESERVE)
SGLANG_GRAPH = Constant("CUDA graph reserve", 2 * MIB, "bytes per request of the largest graph", _RESERVE)
SGLANG_PREFILL_GRAPH = Constant("prefill graph reserve", 8 * MIB, "bytes per graph", _RESERVE)
SGLANG_LATENT_GRAPHS = Constant("prefill graphs of latent attention", 1.5 * GIB, "bytes", _RESERVE)
SGLANG_PADDING = Constant(
    "padding of data-parallel attention", 3 * MIB, "bytes per request of the largest graph and group", _RESERVE
)
SGLANG_LARGE_PADDING = Constant(
    "padding above 300 requests", 1.5 * MIB, "bytes per request of the largest graph and group", _RESERVE
)
SGLANG_DEEPEP_PREFILL = Constant("DeepEP with prefill graphs", 1 * GIB, "bytes", _RESERVE)
SGLANG_DEEPEP_DECODE = Constant("DeepEP with decode graphs", 2 * GIB, "bytes", _RESERVE)
SGLANG_LEAST = Constant("smallest reserve above 60 GiB", 10 * GIB, "bytes", _RESERVE)
LEAST_RESERVE = Constant(
    "reserve of a tuned engine",
    5.07e9,
    "bytes",
    "context, graphs and activations of an engine with the highest static fraction with which it starts",
    fitted_on="DeepSeek-R1 FP8 on 8xH20 under TP: batch 52",
)
BANDWIDTH_SHARE = Constant(
    "share of HBM bandwidth reached by decoding",
    0.685,
    "achieved / peak",
    "gpt-fast README: Llama-2-7B on an A100, batch 1, 104.9 tokens/s * 13.3 GB = 1397 of 2039 GB/s",
)
KERNEL_SECONDS = Constant(
    "fixed time per kernel",
    3.4e-6,
    "s, in addition to its work",
    "gpt-fast README: Llama-2-70B TP8, 62.50 tokens/s at 1135 GB/s: 16.0 ms, of which reading at 1397 GB/s takes 13.0; "
    "80 layers of 11 kernels",
)
COMPUTE_SHARE = Constant(
    "share of peak FLOPs reached by prefill",
    0.59,
    "achieved / peak",
    "lmsys.org 2025-09-26: DeepSeek-R1 FP8, 8xH20, inputs of 4096: 16,500 tokens/s = 1.39 of 2.37 PFLOP/s",
)
LINK_SHARE = Constant(
    "share of link bandwidth reached by NCCL",
    370 / 450,
    "achieved / peak",
    "NCCL's authors, github.com/NVIDIA/nccl-tests/issues/212: 370 of 450 GB/s on H100, the rest is protocol",
)
LATENT_TILE = Constant(
    "tile of latent attention",
    64,
    "query heads, or cached tokens",
    "github.com/deepseek-ai/FlashMLA/issues/30, on H20: 16 heads take as long as 64 (0.60 and 0.61 ms), 80 take twice as long",
)
ATTENTION_BLOCKS = Constant(
    "blocks of grouped-query attention",
    2,
    "per streaming multiprocessor",
    "FlashInfer, attention/scheduler.cuh (PrefillPlan): it splits sequences into as many parts as fit at once; each ends "
    "with half a part on average",
)
NEW_TOKENS = Constant(
    "reserve for running requests",
    0.098,
    "share of the tokens that they may still generate",
    "SGLang 0.5.23, environ.py: SGLANG_INIT_NEW_TOKEN_RATIO 0.7 * SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR 0.14",
)
NODE_HOP_SECONDS = Constant(
    "all-reduce latency across nodes",
    55e-6,
    "s",
    "NCCL, src/graph/tuning.cc: tree, LL128, 4 nodes of 8: 4.4 us + 2 * (7 * 1.2 us of NVLink + 2 * 8.5 us of network) = 55 us",
)
EXCHANGE_SECONDS = Constant(
    "DCP's exchange",
    1.35e-6,
    "s per request and layer, in addition to three kernels and the bytes over the links",
    "queries out, partial outputs and log-sum-exp back and merged",
    fitted_on="Qwen3-235B on 8xH20, 32k/4k, minimum of the largest relative error of the gains at concurrency 48 to 96",
)
HOST_SERVER = Constant(
    "engine's HTTP server on a CPU", 921 * MIB, "bytes", "measured: ps, quickstart engines, SGLang 0.5.23"
)
HOST_SCHEDULER = Constant(
    "engine's scheduler on a CPU",
    665 * MIB,
    "bytes",
    "measured: ps, after a batch of 256, less weights, cache and states",
)
HOST_DETOKENIZER = Constant("engine's detokenizer on a CPU", 576 * MIB, "bytes", "measured: ps, quickstart engines")
HOST_RANK = Constant(
    "trainer rank on a CPU", 740 * MIB, "bytes", "measured: resident memory of a rank before its first step"
)

CONSTANTS = (
    CUDA_CONTEXT,
    NCCL_BUFFERS,
    SYMMETRIC_MEMORY,
    FLASHINFER_WORKSPACE,
    ALLOCATOR,
    PINNED,
    PINNED_BLOCKS,
    SGLANG_META,
    SGLANG_PREFILL,
    SGLANG_PARALLEL,
    SGLANG_GRAPH,
    SGLANG_PREFILL_GRAPH,
    SGLANG_LATENT_GRAPHS,
    SGLANG_PADDING,
    SGLANG_LARGE_PADDING,
    SGLANG_DEEPEP_PREFILL,
    SGLANG_DEEPEP_DECODE,
    SGLANG_LEAST,
    LEAST_RESERVE,
    BANDWIDTH_SHARE,
    KERNEL_SECONDS,
    COMPUTE_SHARE,
    LINK_SHARE,
    LATENT_TILE,
    ATTENTION_BLOCKS,
    NEW_TOKENS,
    NODE_HOP_SECONDS,
    EXCHANGE_SECONDS,
    HOST_SERVER,
    HOST_SCHEDULER,
    HOST_DETOKENIZER,
    HOST_RANK,
)
FITTED = tuple(constant for constant in CONSTANTS if constant.fitted_on)
