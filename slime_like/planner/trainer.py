"""Memory of one Megatron rank: weights, gradients, optimizer, activations, and the output layer's chunks of logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from slime_like.planner import constants
from slime_like.planner.shapes import ATTENTION, LATENT, MIXERS, ModelShape
from slime_like.planner.stages import StageSegment, even_sizes, stage_segments
from slime_like.planner.table import Item, MemoryTable, items
from slime_like.util.vocabulary import padded_vocabulary

PARAMETER_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # float32, in one buffer per rank
MOMENT_BYTES = 8  # Adam's two moments, in float32
MAIN_BYTES = 4  # float32 copy of 16-bit weights
BUILD = "build"
"""Name of the item for the difference, if a rank needs more memory while its model is built than during a step."""
POLICY, VALUE, SCORING = "policy", "value", "scoring"
"""Tasks of a rank: train with an output layer, train with a value head (critic), and forward passes alone (teacher)."""


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Layout and options of the trainer's ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    tokens: int = 8_192  # packed tokens of a micro-batch on one rank
    dtype: str = "bfloat16"
    recompute: str = "none"  # none | selective | full
    recompute_method: str = "uniform"  # for full: uniform (all layers) | block (first layers of each segment)
    recompute_layers: int = 1  # uniform: layers that are recomputed together; block: recomputed layers per segment
    logits_chunk: int = 4_096
    offload: float = 0.0  # share of the optimizer that is in host memory
    distributed_optimizer: bool = True
    sequence_parallel: bool = True
    grouped_experts: bool = True  # one grouped GEMM for all experts of a rank, not one GEMM per expert
    trained_share: float = 1.0  # trained tokens / tokens: prompts are not scored
    task: str = POLICY
    segments: tuple[int, ...] = ()  # layers of each of the pp * vpp pipeline segments; (): an even split without vpp
    num_micro_batches: int | None = None  # maximum of an optimizer step on one rank; None: enough to fill the pipeline

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Parameter tensors of one size on one rank."""

    size: float  # elements of one tensor
    num_tensors: float


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameter tensors of a pipeline stage on one rank."""

    divided_tensors: tuple[TensorGroup, ...]  # dense, divided by tensor parallelism
    replicated_tensors: tuple[TensorGroup, ...]  # dense, held in full by each tensor parallel rank
    expert_tensors: tuple[TensorGroup, ...]  # gradients are reduced over ranks with the same part of the experts

    @property
    def dense_tensors(self) -> tuple[TensorGroup, ...]:
        """Tensors whose gradients are reduced over dp * cp ranks."""
        return self.divided_tensors + self.replicated_tensors

    @property
    def total(self) -> float:
        """Number of all parameters of the rank."""
        return num_parameters(self.dense_tensors) + num_parameters(self.expert_tensors)

    def shard(self, settings: TrainerSettings) -> float:
        """Return the number of parameters whose optimizer state one rank keeps."""
        dense, expert = num_shards(settings)
        return num_parameters(self.dense_tensors) / dense + num_parameters(self.expert_tensors) / expert

    def num_saved(self, settings: TrainerSettings) -> float:
        """Return the mean number of parameters that a rank writes to a checkpoint.

        Of the ranks that hold replicas of a parameter, one writes it.
        """
        copies, expert_copies = num_replicas(settings)
        dense = num_parameters(self.divided_tensors) + num_parameters(self.replicated_tensors) / settings.tp
        return dense / copies + num_parameters(self.expert_tensors) / expert_copies


def num_parameters(tensors: tuple[TensorGroup, ...]) -> float:
    """Return the number of elements of these tensors."""
    return sum(tensor.size * tensor.num_tensors for tensor in tensors)


def num_shards(settings: TrainerSettings) -> tuple[int, int]:
    """Return the number of ranks over which the optimizer state of dense parameters is divided, and the number for experts."""
    return num_replicas(settings) if settings.distributed_optimizer else (1, 1)


def num_replicas(settings: TrainerSettings) -> tuple[int, int]:
    """Return the number of ranks with the same part of the divided tensors, and the number with the same part of the experts."""
    s = settings
    return s.dp * s.cp, max(1, s.tp * s.cp * s.dp // (s.ep * s.etp))


def stage_parameters(shape: ModelShape, settings: TrainerSettings, stage: int) -> RankParameters:
    """Return the parameters of pipeline stage ``stage`` on one rank.

    The first stage has the embedding; the last one has the final norm and the output layer or value head.
    """
    s, part = settings, _part(shape, _segments(shape, settings, stage))
    is_last = stage == s.pp - 1
    num_norms = 2 * len(part.layers) + is_last + (is_last and s.task == VALUE)  # and a critic's value head
    has_output = is_last and s.task != VALUE and not (part.tied and s.pp == 1)  # with stages, tied tables are copies
    table = padded_vocabulary(part.vocabulary, s.tp) * part.hidden / s.tp
    experts = part.experts
    num_stage_experts = part.sparse_layers * experts.num_experts if experts else 0
    routed = _mlp_tensors(part.hidden, experts.width) if experts else ()
    return RankParameters(
        divided_tensors=(
            *(TensorGroup(size / s.tp, count) for size, count in _divided_tensors(part)),
            TensorGroup(table, (stage == 0) + has_output),
        ),
        replicated_tensors=(
            *(TensorGroup(size, count) for size, count in _replicated_tensors(part)),
            TensorGroup(part.hidden, num_norms),
            TensorGroup(part.router_parameters, part.sparse_layers),
        ),
        expert_tensors=tuple(TensorGroup(size / s.etp, num_stage_experts / s.ep) for size in routed),
    )


def _divided_tensors(part: ModelShape) -> Iterator[tuple[int, int]]:
    """Yield (size, number) of each kind of layer tensor that tensor parallelism divides."""
    for mixer in MIXERS:
        yield from ((size, part.count(mixer)) for size in part.divided_tensors(mixer))
    yield from ((size, len(part.layers) - part.sparse_layers) for size in _mlp_tensors(part.hidden, part.dense_width))
    if e := part.experts:
        yield from ((size, part.sparse_layers) for size in _mlp_tensors(part.hidden, e.shared_width))


def _replicated_tensors(part: ModelShape) -> Iterator[tuple[int, int]]:
    """Yield (size, number) of the layer tensors that each tensor parallel rank holds in full, except router and layer norms."""
    for mixer in MIXERS:
        yield from ((size, part.count(mixer)) for size in part.replicated_tensors(mixer))
    if (e := part.experts) and e.shared_gate:
        yield part.hidden, part.sparse_layers


def _mlp_tensors(hidden: int, width: int) -> tuple[int, int]:
    """Return the number of elements of each weight of an MLP: the fused gate and up projection, and the down projection."""
    return 2 * hidden * width, hidden * width


def trainer_memory(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the memory of one rank at its peak: while the model is built, or during an optimizer step.

    A rank with the task ``SCORING`` has its peak in a forward pass. The memory includes CUDA context, communicators, and memory
    that the allocator reserves but does not allocate.
    """
    allocated = allocated_items(shape, settings)
    groups = sum(size > 1 for size in (settings.tp, settings.cp, settings.pp, settings.ep, settings.etp)) + (
        settings.world_size > 1
    )
    overhead = items(
        ("allocator", allocated.total * (constants.ALLOCATOR.value - 1), "reserved but not allocated"),
        ("CUDA context", constants.CUDA_CONTEXT.value, ""),
        ("communicators", constants.NCCL_BUFFERS.value * groups, "NCCL"),
    )
    return replace(allocated, items=(*allocated.items, *overhead))


def allocated_items(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the tensors of one rank at its peak. Their sum is torch's allocated memory.

    With pipeline stages, the rank is in the stage that needs the most memory, and the table names this stage.
    """
    return max((stage_items(shape, settings, stage) for stage in range(settings.pp)), key=lambda table: table.total)


def stage_items(shape: ModelShape, settings: TrainerSettings, stage: int) -> MemoryTable:
    """Return the tensors of one rank of a pipeline stage at its peak."""
    s, parameters = settings, stage_parameters(shape, settings, stage)
    weights = ("weights", parameters.total * PARAMETER_BYTES[s.dtype], s.dtype)
    place = f"pipeline stage {stage + 1} of {s.pp}" if s.pp > 1 else ""
    if s.task == SCORING:
        return MemoryTable((*items(weights), *_transient(shape, s, stage)), place)
    activations = _activation_bytes(shape, s, stage)
    state = MOMENT_BYTES + (MAIN_BYTES if s.dtype == "bfloat16" else 0)
    rows = items(
        weights,
        ("gradients", parameters.total * GRADIENT_BYTES, "float32"),
        ("optimizer", parameters.shard(s) * state * (1 - s.offload), _optimizer_note(s)),
        ("activations", activations, _activation_note(shape, s, stage)),
    )
    rows = (*rows, *_transient(shape, s, stage))
    excess = build_bytes(shape, s, stage) - sum(row.num_bytes for row in rows)
    return MemoryTable((*rows, *items((BUILD, max(0.0, excess), "at the start, above the peak of a step"))), place)


def build_bytes(shape: ModelShape, settings: TrainerSettings, stage: int) -> float:
    """Return the peak bytes of the tensors of one rank of a pipeline stage while its model and optimizer are built.

    For each segment, first for dense parameters and then for experts, megatron allocates gradients and, with the distributed
    optimizer, copies the weights into one buffer. The optimizer's main weights come last; its moments follow in the first step.
    If a part of the optimizer is on the host, an optimizer over all parameters of the rank is built first
    (``HybridDeviceOptimizer``).
    """
    s, parameters = settings, stage_parameters(shape, settings, stage)
    weight, segments = PARAMETER_BYTES[s.dtype], len(_segments(shape, s, stage))
    copy = weight if s.distributed_optimizer else 0
    dense, experts = (num_parameters(t) / segments for t in (parameters.dense_tensors, parameters.expert_tensors))
    last_segment = max(dense * (copy + GRADIENT_BYTES), (dense + experts) * GRADIENT_BYTES + experts * copy)
    buffers = parameters.total * GRADIENT_BYTES * (segments - 1) / segments + last_segment
    num_main = parameters.shard(s) + (parameters.total if s.offload else 0)
    main = num_main * MAIN_BYTES * (1 - s.offload) if s.dtype == "bfloat16" else 0.0
    return weight * parameters.total + max(buffers, parameters.total * GRADIENT_BYTES + main)


def layer_bytes(shape: ModelShape, settings: TrainerSettings, mixer: str, *, sparse: bool) -> float:
    """Return the bytes per token that one layer keeps for its backward pass, as slime_like's layers save them.

    Around mixer and MLP, the residual stream and each norm's output are saved: five tensors of the hidden size. Attention
    saves its queries before and after rotation, its output, its keys and values twice, cosines and sines, and a float32 per
    head; an output gate and context parallelism add to this. An MLP saves both halves of its first GEMM's output, one half
    again after its activation, the other again after an offset is added, and the second GEMM's input: five tensors of its
    width. Grouped experts save only both halves and the second GEMM's input. Each of the etp ranks that share an expert has
    all of its tokens and a part of its width. Gated DeltaNet in torch keeps ten tensors of its channels and values (measured
    on a CPU); fused kernels on a GPU keep fewer.
    """
    s, element = settings, PARAMETER_BYTES[settings.dtype]
    local = s.tp if s.sequence_parallel else 1
    numbers = 5 * shape.hidden / local
    small_numbers = 0.0
    if mixer == ATTENTION and (a := shape.attention):
        numbers += (3 * a.query + 4 * a.key + 2 * a.key * (s.cp - 1) + a.query * 2 * a.gated) / s.tp + 4 * a.head_dim
        small_numbers += 4 * a.heads / s.tp
    elif mixer == LATENT and (m := shape.latent):
        query, value = m.heads * (m.nope_dim + m.rope_dim), m.heads * m.value_dim
        numbers += (4 * query + 3 * value) / s.tp + 2 * (m.query_rank + m.kv_rank) + m.rope_dim
        small_numbers += 4 * m.heads / s.tp
    elif r := shape.recurrence:
        numbers += 10 * (r.channels + r.values) / s.tp
    if not sparse:
        return element * (numbers + 5 * shape.dense_width / s.tp) + small_numbers
    assert shape.experts is not None, "a sparse layer has experts"
    e = shape.experts
    widths = 3 if s.grouped_experts else 5  # saved for the backward pass
    routed = e.per_token * (s.etp * shape.hidden + widths * e.width) + 4 * shape.hidden
    return element * (numbers + routed / local + 5 * e.shared_width / s.tp) + small_numbers


def _segments(shape: ModelShape, settings: TrainerSettings, stage: int) -> tuple[StageSegment, ...]:
    sizes = settings.segments or even_sizes(len(shape.layers), settings.pp)
    return stage_segments(stage, settings.pp, sizes, settings.num_micro_batches)


def _part(shape: ModelShape, segments: tuple[StageSegment, ...]) -> ModelShape:
    """Return the model with only the layers of these segments."""
    layers = (shape.layers[segment.first : segment.first + segment.num_layers] for segment in segments)
    return replace(shape, layers=sum(layers, ()))


def _layer_bytes(shape: ModelShape, settings: TrainerSettings, *segments: StageSegment) -> list[float]:
    """Return the bytes per token of each layer of the segments."""
    layers = _part(shape, segments).layers
    return [layer_bytes(shape, settings, layer.mixer, sparse=layer.sparse) for layer in layers]


def _activation_bytes(shape: ModelShape, settings: TrainerSettings, stage: int) -> float:
    """Return the bytes that the layers of a stage keep for the micro-batches in flight."""
    s, total = settings, 0.0
    local = s.tp if s.sequence_parallel else 1
    for segment in _segments(shape, s, stage):
        per_layer, num_inputs = _layer_bytes(shape, s, segment), 0
        if s.recompute == "full" and s.recompute_method == "block":
            num_inputs, per_layer = min(s.recompute_layers, segment.num_layers), per_layer[s.recompute_layers :]
        elif s.recompute == "full":
            num_inputs, per_layer = -(-segment.num_layers // s.recompute_layers), []
        inputs = num_inputs * PARAMETER_BYTES[s.dtype] * shape.hidden / local
        total += segment.in_flight * s.tokens * (inputs + sum(per_layer))
    return total


def _transient(shape: ModelShape, settings: TrainerSettings, stage: int) -> tuple[Item, ...]:
    """Return the larger of two items: memory of the output layer or value head, and memory of recomputed layers.

    The first item exists only on the last stage. The second exists with full recomputation; on a rank that only scores, the
    forward pass of one layer takes its place. The tuple is empty if neither exists.
    """
    s, rows = settings, []
    per_layer = _layer_bytes(shape, s, *_segments(shape, s, stage))
    if s.task == SCORING:
        rows.append(("forward pass", s.tokens * max(per_layer), "one layer"))
    elif s.recompute == "full":
        num_layers = s.recompute_layers if s.recompute_method == "uniform" else 1
        rows.append(("recomputed layers", s.tokens * max(per_layer) * (num_layers + 0.5), ""))
    if stage == s.pp - 1:
        rows.append(_head_item(shape, s))
    return items(max(rows, key=lambda row: row[1])) if rows else ()


def _head_item(shape: ModelShape, settings: TrainerSettings) -> tuple[str, float, str]:
    s, element = settings, PARAMETER_BYTES[settings.dtype]
    if s.task == VALUE:  # hidden states of all tokens, those of trained tokens in float32, and the gradients of both
        num_bytes = shape.hidden * s.tokens * (2 * element + s.trained_share * (element + 2 * 4))
        return "value head", num_bytes, "hidden states in float32"
    forward, backward = _head_bytes(shape, s)
    largest = forward if s.task == SCORING else max(forward, backward)
    return "output layer", largest, f"logits in chunks of {s.logits_chunk} tokens"


def _head_bytes(shape: ModelShape, settings: TrainerSettings) -> tuple[float, float]:
    """Return the bytes of the output layer, besides weights, in the forward and the backward pass on the last pipeline stage.

    In the forward pass, two float32 tensors of one chunk are alive while the next chunk's logits are computed in 16 bit and
    float32. In the backward pass, the weight's gradient is float32, and a chunk's gradient is alive while the next chunk's
    logits are computed.
    """
    s, element = settings, PARAMETER_BYTES[settings.dtype]
    num_scored = s.tokens * s.trained_share
    first = min(s.logits_chunk, num_scored)
    second = min(s.logits_chunk, num_scored - first)
    rows = padded_vocabulary(shape.vocabulary, s.tp) / s.tp
    cast = 4 + (element if element < 4 else 0)
    hidden = element * num_scored * shape.hidden * 2 + element * s.tokens * shape.hidden * 2
    forward = rows * max(8 * first, 8 * first + cast * second)
    backward = rows * (4 * shape.hidden + max(cast * first, element * first + cast * second))
    return forward + hidden, backward + hidden


def _optimizer_note(settings: TrainerSettings) -> str:
    copies = settings.dp * settings.cp if settings.distributed_optimizer else 1
    share = f"over {copies} ranks" if copies > 1 else ""
    host = f"{settings.offload:.0%} on the host" if settings.offload else ""
    return ", ".join(part for part in (share, host) if part)


def _activation_note(shape: ModelShape, settings: TrainerSettings, stage: int) -> str:
    in_flight = sum(segment.in_flight for segment in _segments(shape, settings, stage))
    prefix = f"{in_flight} times " if in_flight > 1 else ""
    return f"{prefix}{settings.tokens} tokens, recompute {settings.recompute}"
