"""Memory of one Megatron rank: weights, gradients, optimizer, activations, and the chunks of the output layer."""

from __future__ import annotations

from dataclasses import dataclass

from slime_like.planner import constants
from slime_like.planner.shapes import ATTENTION, LATENT, RECURRENT, ModelShape
from slime_like.planner.table import MemoryTable, items

PARAMETER_BYTES = {"float32": 4, "bfloat16": 2}
GRADIENT_BYTES = 4  # float32, in one buffer per rank
MOMENT_BYTES = 8  # Adam's two
MAIN_BYTES = 4  # float32 copy of 16-bit weights
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Layout and options of the trainer's ranks."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    tokens: int = 8_192  # packed tokens of a micro-batch on one rank
    dtype: str = "bfloat16"
    recompute: str = "none"  # none | selective | full
    recompute_layers: int = 1  # layers per recomputed piece
    logits_chunk: int = 4_096
    offload: float = 0.0  # share of the optimizer that is in host memory
    distributed_optimizer: bool = True
    sequence_parallel: bool = True
    trained_share: float = 1.0  # trained tokens / tokens: prompts are not scored

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters of the largest pipeline stage on one rank."""

    dense: float  # reduced over dp * cp
    experts: float  # reduced over the copies of an expert


def rank_parameters(shape: ModelShape, settings: TrainerSettings) -> RankParameters:
    """Return the parameters on one rank; with pipeline stages, the larger of the first and the last."""
    s = settings
    stage = _stage_share(shape, s)
    mixers = sum(shape.count(mixer) * shape.mixer_parameters(mixer) for mixer in (ATTENTION, LATENT, RECURRENT))
    dense_layers = len(shape.layers) - shape.sparse_layers
    matrices = mixers + dense_layers * shape.dense_parameters + shape.sparse_layers * shape.shared_parameters
    norms = 2 * len(shape.layers) * shape.hidden + shape.sparse_layers * shape.router_parameters
    rows = padded_vocabulary(shape.vocabulary, s.tp) * shape.hidden / s.tp
    tables = rows * (2 if s.pp == 1 and not shape.tied else 1)
    return RankParameters(
        dense=stage * (matrices / s.tp + norms) + tables + shape.hidden,
        experts=stage * shape.routed_parameters / s.ep,
    )


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Return the rows of the trainer's embedding: a multiple of 128, or of 128 * tp if tp does not divide 128."""
    multiple = VOCABULARY_MULTIPLE if VOCABULARY_MULTIPLE % tp == 0 else VOCABULARY_MULTIPLE * tp
    return -(-vocabulary // multiple) * multiple


def trainer_memory(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the peak memory of one rank during an optimizer step, with the allocator's overhead."""
    allocated = allocated_items(shape, settings)
    total = sum(item.num_bytes for item in allocated.items)
    groups = sum(size > 1 for size in (settings.tp, settings.cp, settings.pp, settings.ep)) + (settings.world_size > 1)
    rest = items(
        ("allocator", total * (constants.ALLOCATOR.value - 1), "reserved but not allocated"),
        ("CUDA context", constants.CUDA_CONTEXT.value, ""),
        ("communicators", constants.NCCL_BUFFERS.value * groups, "NCCL"),
    )
    return MemoryTable((*allocated.items, *rest))


def allocated_items(shape: ModelShape, settings: TrainerSettings) -> MemoryTable:
    """Return the tensors of one rank at the peak of an optimizer step: what torch counts as allocated."""
    s = settings
    parameters = rank_parameters(shape, s)
    total = parameters.dense + parameters.experts
    copies = s.dp * s.cp if s.distributed_optimizer else 1
    expert_copies = max(1, s.tp * s.cp * s.dp // s.ep) if s.distributed_optimizer else 1
    shard = parameters.dense / copies + parameters.experts / expert_copies
    state = MOMENT_BYTES + (MAIN_BYTES if s.dtype == "bfloat16" else 0)
    kept, working = _activation_bytes(shape, s)
    in_flight = s.pp  # micro-batches whose activations the first stage keeps
    head, backward = _head_bytes(shape, s)
    return MemoryTable(
        items(
            ("weights", total * PARAMETER_BYTES[s.dtype], s.dtype),
            ("gradients", total * GRADIENT_BYTES, "float32"),
            ("optimizer", shard * state * (1 - s.offload), _optimizer_note(s, copies)),
            ("activations", in_flight * kept * _stage_share(shape, s), _activation_note(s)),
            ("output layer", max(head, backward, working), f"logits in chunks of {s.logits_chunk} tokens"),
        )
    )


def host_bytes(shape: ModelShape, settings: TrainerSettings, *, reference: bool) -> float:
    """Return the host memory of one rank on a GPU: offloaded optimizer state, and a reference's weights."""
    parameters = rank_parameters(shape, settings)
    total = parameters.dense + parameters.experts
    state = (MAIN_BYTES + MOMENT_BYTES + GRADIENT_BYTES) * settings.offload / max(1, settings.dp * settings.cp)
    return total * (state + (2 * PARAMETER_BYTES[settings.dtype] if reference else 0))


def layer_bytes(shape: ModelShape, settings: TrainerSettings, mixer: str, *, sparse: bool) -> float:
    """Return the bytes per token that one layer keeps for its backward pass, as slime_like's layers save them.

    Around mixer and MLP: the residual stream and each norm's output, five tensors of the hidden size. Attention saves
    queries before and after rotation and its output, keys and values twice, cosines and sines. An MLP saves both halves
    of its first product, their activation, and the second product's input, five tensors of its width. Gated DeltaNet in
    torch keeps ten tensors of its channels and values (measured on a CPU); fused kernels on a GPU keep fewer.
    """
    s, element = settings, PARAMETER_BYTES[settings.dtype]
    local = s.tp if s.sequence_parallel else 1
    numbers = 5 * shape.hidden / local
    small = 0.0
    if mixer == ATTENTION and (a := shape.attention):
        numbers += (3 * a.query + 4 * a.key + 2 * a.key * (s.cp - 1) + a.query * 2 * a.gated) / s.tp + 4 * a.head_dim
        small += 4 * a.heads / s.tp
    elif mixer == LATENT and (m := shape.latent):
        query, value = m.heads * (m.nope_dim + m.rope_dim), m.heads * m.value_dim
        numbers += (4 * query + 3 * value) / s.tp + 2 * (m.query_rank + m.kv_rank) + m.rope_dim
        small += 4 * m.heads / s.tp
    elif r := shape.recurrence:
        numbers += 10 * (r.channels + r.values) / s.tp
    if not sparse:
        return element * (numbers + 5 * shape.dense_width / s.tp) + small
    assert shape.experts is not None, "a sparse layer has experts"
    e = shape.experts
    routed = e.per_token * (shape.hidden + 5 * e.width) + 4 * shape.hidden
    return element * (numbers + routed / local + 5 * e.shared_width / s.tp) + small


def _activation_bytes(shape: ModelShape, settings: TrainerSettings) -> tuple[float, float]:
    """Return the bytes that all layers of the model keep, and those of the largest piece that is recomputed."""
    s = settings
    per_layer = [layer_bytes(shape, s, layer.mixer, sparse=layer.sparse) for layer in shape.layers]
    if s.recompute != "full":
        return s.tokens * sum(per_layer), 0.0
    local = s.tp if s.sequence_parallel else 1
    inputs = PARAMETER_BYTES[s.dtype] * shape.hidden / local * -(-len(per_layer) // s.recompute_layers)
    return s.tokens * inputs, s.tokens * max(per_layer) * (s.recompute_layers + 0.5)


def _head_bytes(shape: ModelShape, settings: TrainerSettings) -> tuple[float, float]:
    """Return the bytes of the output layer in the forward and the backward pass, on the last pipeline stage.

    Forward, two tensors in float32 of one chunk live while the next chunk's logits are computed in 16 bit and float32.
    Backward, the weight's gradient is float32, and a chunk's gradient lives while the next chunk's logits are computed.
    """
    s, element = settings, PARAMETER_BYTES[settings.dtype]
    scored = s.tokens * s.trained_share
    first = min(s.logits_chunk, scored)
    second = min(s.logits_chunk, scored - first)
    rows = padded_vocabulary(shape.vocabulary, s.tp) / s.tp
    cast = 4 + (element if element < 4 else 0)
    hidden = element * scored * shape.hidden * 2 + element * s.tokens * shape.hidden * 2
    forward = rows * max(8 * first, 8 * first + cast * second)
    backward = rows * (4 * shape.hidden + max(cast * first, element * first + cast * second))
    return forward + hidden, backward + hidden


def _stage_share(shape: ModelShape, settings: TrainerSettings) -> float:
    """Return the share of the layers on the largest pipeline stage."""
    return -(-len(shape.layers) // settings.pp) / len(shape.layers)


def _optimizer_note(settings: TrainerSettings, copies: int) -> str:
    share = f"over {copies} ranks" if copies > 1 else ""
    host = f"{settings.offload:.0%} on the host" if settings.offload else ""
    return ", ".join(part for part in (share, host) if part)


def _activation_note(settings: TrainerSettings) -> str:
    return f"{settings.tokens} tokens, recompute {settings.recompute}"
