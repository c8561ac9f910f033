"""Settings of one engine that determine its memory and speed."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.errors import ConfigError
from slime_like.planner.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine, which consists of ``gpus`` tensor parallel ranks."""

    gpus: int = 1
    dp_attention: int = 1  # groups of gpus / dp_attention tensor parallel ranks, each with its own sequences
    dcp: int = 1  # ranks that share the tokens of a sequence
    flow_mla: tuple[str, ...] = ()  # projections that FlowMLA shards, names as in rollout.flow_mla.weights
    flow_slots: int | None = (
        None  # number of buffers for whole layers; None: two without the rank's own part, as in FlowMLA's article
    )
    remote_experts: int = 0  # routed experts of each layer in the memory of a worker
    remote_on_host: bool = True  # their workers are started by the engine and keep the weights in host memory
    remote_copy: bool = False  # the engine has a copy of their weights in host memory
    weights: str = "bfloat16"
    kv_bytes: int = 2  # per element
    static: float | None = None  # SGLang's mem_fraction_static; None: SGLang's default
    tuned: bool = False  # static is the highest value with which the engine starts
    chunk: int | None = None  # SGLang's chunked_prefill_size; None: its default for the GPU, 0 or less: no chunks
    max_prefill_tokens: int = 16_384  # SGLang's limit of a prefill without chunks
    graph_requests: int | None = None  # requests of the largest CUDA graph of decoding; None: SGLang's default
    decode_graphs: bool = True
    padded_groups: bool = False  # graphs pad each attention group to the requests of all groups (SGLang until mid-2025)
    prefill_graphs: int | None = None  # number of CUDA graphs of prefill; None: SGLang's default
    deepep: bool = False  # SGLang's moe_a2a_backend=deepep
    replicated_head: bool = False  # SGLang's enable_dp_lm_head
    max_running: int | None = None  # SGLang's max_running_requests
    states_per_request: int = 5  # recurrent states counted per request; 3 with no_buffer, 1 without radix cache
    state_slots: int | None = None  # SGLang's max_mamba_cache_size
    max_tokens: int | None = None  # SGLang's max_total_tokens: KV capacity of an attention group, per DCP rank
    rank_memory: int | None = None  # bytes of an engine rank on a CPU; None: a share of the machine's memory
    replicated_q: bool = False  # each DCP rank also has the query projections of its group
    symmetric_memory: bool = False  # SGLang's enable_symm_mem
    workspaces: int = 0  # of FlashInfer's attention, in units of constants.FLASHINFER_WORKSPACE

    @property
    def attention_tp(self) -> int:
        """Number of ranks over which a sequence's attention heads are split."""
        return self.gpus // self.dp_attention


def check_engine(shape: ModelShape, settings: EngineSettings) -> None:
    """Raise ``ConfigError`` if ``dp_attention``, ``dcp`` or ``attention_tp`` does not divide the ranks or heads it splits."""
    s = settings
    if s.gpus % s.dp_attention:
        raise ConfigError(
            f"--dp-attention {s.dp_attention} does not divide the engine's {s.gpus} GPUs (--tp): set a divisor of {s.gpus}"
        )
    if s.attention_tp % s.dcp:
        raise ConfigError(
            f"--dcp {s.dcp} does not divide the {s.attention_tp} ranks of an attention group (--tp / --dp-attention): "
            f"set a divisor of {s.attention_tp}"
        )
    if shape.heads % s.attention_tp:
        raise ConfigError(
            f"--tp {s.gpus} / --dp-attention {s.dp_attention} = {s.attention_tp} does not divide the {shape.heads} attention "
            f"heads of {shape.name}: set --tp to a divisor"
        )
