"""Predicted memory of one engine, from its spec and the machine."""

from __future__ import annotations

from dataclasses import replace

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.types import RoleShapes
from slime_like.config.schema import remote_experts
from slime_like.config.schema.dcp import BACKEND_FIELDS, default_backend
from slime_like.config.schema.flow_mla import from_json
from slime_like.config.schema.rank_memory import rank_memory
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.root import TrainConfig
from slime_like.hardware import GPUS, GpuKind, Hardware, known_gpu, unknown_speed
from slime_like.planner.engine import EngineMemory, engine_memory, state_bytes, token_bytes
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.host import host_engine, host_pool, host_processes
from slime_like.planner.shapes import ModelShape
from slime_like.planner.static_fraction import graph_sizes
from slime_like.util.gpus import MIG

KV_BYTES = {"auto": 2, "bfloat16": 2, "fp8_e5m2": 1, "fp8_e4m3": 1}
"""Map from SGLang's kv_cache_dtype to the bytes per element of the KV cache of a 16-bit model."""
CAPTURING_BACKENDS = ("none", "deepep", "megamoe", "flashinfer")
"""Values of moe_a2a_backend for which SGLang captures prefill graphs by default."""


def predict_engine(cfg: TrainConfig, machine: Machine, shapes: RoleShapes, engine: EngineSpec) -> EngineMemory | str:
    """Return the memory of an engine rank on a GPU or of an engine on a CPU, or the reason why it cannot be predicted."""
    if engine.device != "cuda" and shapes.actor is not None:
        return host_engine_memory(machine, shapes.actor, engine)
    hardware = known_hardware(cfg, machine, shapes)
    if isinstance(hardware, str):
        return hardware
    assert shapes.actor is not None, "known_hardware returns the reason"
    return engine_memory(shapes.actor, engine_settings(engine), hardware)


def known_hardware(cfg: TrainConfig, machine: Machine, shapes: RoleShapes) -> Hardware | str:
    """Return the GPUs of a run, or the reason why no memory can be predicted on them."""
    if cfg.placement.ray_address is not None and machine.is_local:
        return "the GPUs of a joined Ray cluster are known only once it responds"
    if shapes.actor is None:
        return shapes.unknown
    gpu = _smallest_gpu(machine)
    if isinstance(gpu, str):
        return gpu
    return Hardware(gpu, machine.num_gpus // machine.nodes, machine.nodes)


def _smallest_gpu(machine: Machine) -> GpuKind | str:
    """Return the GPU with the least memory, or the reason why it is unknown.

    The memory is that reported by NVIDIA's driver or, if it reported none, that in the planner's table.
    """
    names = machine.gpu_names or ("",)
    if slices := [name for name in names if name.endswith(f" {MIG}")]:
        return f"the memory of a MIG slice is not known ({slices[0]})"
    kinds = {name: known_gpu(name) for name in names}
    if machine.gpu_bytes:
        min_bytes = min(machine.gpu_bytes)
        name = names[machine.gpu_bytes.index(min_bytes)]
        return replace(kinds[name] or unknown_speed(name), memory=min_bytes)
    unknown = next((name for name, kind in kinds.items() if kind is None), None)
    if unknown is not None:
        return f"the planner does not know the GPU {unknown!r}: its table has {', '.join(GPUS)}"
    return min((kind for kind in kinds.values() if kind is not None), key=lambda kind: kind.memory)


def host_engine_memory(
    machine: Machine, shape: ModelShape, engine: EngineSpec, static: float | None = None
) -> EngineMemory:
    """Return the resident memory of one engine on a CPU. ``static``: see ``engine_settings``."""
    settings = engine_settings(engine, static)
    processes = sum(item.num_bytes for item in host_processes(settings))
    pool = host_pool(shape, settings, machine.memory_bytes - processes, machine.numa_nodes)
    per_token, per_state = token_bytes(shape, settings), state_bytes(shape, settings)
    return EngineMemory(
        table=host_engine(shape, settings, pool),
        pool=pool.tokens * per_token,
        token_bytes=per_token,
        slot_bytes=per_state,
        state_requests=pool.slots // settings.states_per_request,
        groups=settings.dp_attention,
    )


def engine_settings(spec: EngineSpec, static: float | None = None) -> EngineSettings:
    """Return the planner's settings of an engine; fields of ``rollout.sglang`` that the planner does not know are ignored.

    ``static``, if set, replaces the engine's ``mem_fraction_static``.
    """
    options = spec.sglang
    sizes = options.get("cuda_graph_bs_decode")
    wide = 4 if spec.dtype == "float32" else KV_BYTES.get(str(options.get("kv_cache_dtype", "auto")), 2)
    flow_mla = from_json(spec.flow_mla) if spec.flow_mla else None
    remote = remote_experts.from_json(spec.remote_experts) if spec.remote_experts else remote_experts.RemoteOptions()
    return EngineSettings(
        gpus=spec.tp,
        remote_experts=remote.count or len(remote.experts),
        remote_on_host=remote.device == "cpu" and not remote.workers,
        remote_copy=remote.policy != "required",
        dcp=spec.dcp,
        dp_attention=spec.dp_attention,
        flow_mla=flow_mla.weights if flow_mla else (),
        flow_slots=flow_mla.prefetch_distance if flow_mla else None,
        weights="fp8" if spec.float8 or options.get("quantization") == "fp8" else spec.dtype,
        kv_bytes=wide,
        static=static or options.get("mem_fraction_static"),
        chunk=options.get("chunked_prefill_size"),
        max_prefill_tokens=int(options.get("max_prefill_tokens") or 16_384),
        graph_requests=max(sizes) if sizes else options.get("cuda_graph_max_bs_decode"),
        decode_graphs=_captures(spec, "decode"),
        prefill_graphs=_prefill_graphs(spec),
        deepep=options.get("moe_a2a_backend") == "deepep",
        replicated_head=bool(options.get("enable_dp_lm_head")),
        max_running=spec.max_running_requests,
        states_per_request=_states_per_request(spec),
        state_slots=options.get("max_mamba_cache_size"),
        max_tokens=options.get("max_total_tokens"),
        rank_memory=rank_memory() if spec.device == "cpu" else None,
        replicated_q=spec.dcp_replicate_q,
        symmetric_memory=spec.symmetric_memory,
        workspaces=_workspaces(spec),
    )


def _workspaces(spec: EngineSpec) -> int:
    """Return the size of FlashInfer's workspace in units of ``constants.FLASHINFER_WORKSPACE``.

    It is 0 if no backend that uses FlashInfer is set. SGLang's default backend for a GPU is taken into account only with
    decode context parallelism.
    """
    names = {str(spec.sglang[field]) for field in BACKEND_FIELDS if spec.sglang.get(field)}
    if spec.dcp > 1 and not spec.sglang.get(BACKEND_FIELDS[0]):
        names.add(default_backend(spec.device, latent=spec.latent))
    if spec.device != "cuda" or not any(name.startswith(("flashinfer", "trtllm", "cutedsl")) for name in names):
        return 0
    return (4 if spec.deterministic else 1) + ("trtllm_mha" in names)  # trtllm_mha allocates another workspace


def _captures(spec: EngineSpec, phase: str) -> bool:
    """Return True if SGLang captures CUDA graphs for ``phase``; a graph backend setting overrides the ``disable_*`` flags."""
    options = spec.sglang
    backend = options.get(f"cuda_graph_backend_{phase}")
    if backend is not None:
        return backend != "disabled"
    return phase not in spec.uncaptured and not (
        options.get("disable_cuda_graph") or options.get(f"disable_{phase}_cuda_graph")
    )


def _prefill_graphs(spec: EngineSpec) -> int | None:
    """Return the number of CUDA graphs captured for prefill; None if SGLang chooses it."""
    options = spec.sglang
    if not _captures(spec, "prefill"):
        return 0
    default = options.get("cuda_graph_backend_prefill") is None
    if default and (
        options.get("enable_two_batch_overlap") or options.get("moe_a2a_backend", "none") not in CAPTURING_BACKENDS
    ):
        return 0
    sizes, largest = options.get("cuda_graph_bs_prefill"), options.get("cuda_graph_max_bs_prefill")
    return len(sizes) if sizes else len(graph_sizes(largest)) if largest else None


def _states_per_request(spec: EngineSpec) -> int:
    """Return the number of recurrent states that SGLang counts per request.

    It is 1 if the radix cache is disabled, otherwise 3 plus the number of states that the radix cache tracks.
    """
    options = spec.sglang
    on_host = spec.device == "cpu"
    if options.get("disable_radix_cache"):
        return 1
    overlap = not options.get("disable_overlap_schedule", on_host)
    strategy = options.get("mamba_radix_cache_strategy", "auto")
    if strategy == "auto":
        paged = (options.get("page_size") or 1) > 1
        strategy = "extra_buffer" if (spec.dcp > 1 if on_host else overlap or paged) else "no_buffer"
    tracked = {"no_buffer": 0, "extra_buffer_lazy": 1}.get(strategy, 2 if overlap else 1)
    return 3 + tracked
