"""Every collective that the wrapper of ``slime_like.distributed`` knows: one canonical name each, and what else it is called.

Torch-free, so that ``guard.ops.<op>`` is checked when a config is loaded. Names are those of ``torch.distributed``, 2.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slime_like.errors import ConfigError
from slime_like.registry import nearest


class Kind(StrEnum):
    """How ranks take part in an op."""

    COLLECTIVE = "collective"  # every rank of the group calls it, in the same order
    POINT = "point"  # two ranks call it
    COMPOSITE = "composite"  # a function made of others, which are counted beside it


@dataclass(frozen=True, slots=True)
class Op:
    """One op. ``methods`` are those of ``ProcessGroup`` by which it is issued: where calls are seen, whoever makes them.

    A composite has no methods: it is seen at ``functions`` of torch.distributed, and its policy holds for all it does.
    """

    name: str
    methods: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()  # of torch.distributed, besides ``name``; for a composite those that are wrapped
    kind: Kind = Kind.COLLECTIVE
    payload: int | None = 0  # the argument of the method whose bytes count; None: it carries none
    alike: bool = True  # every rank passes as many bytes


def _point(name: str, *methods: str) -> Op:
    return Op(name, methods, kind=Kind.POINT, alike=False)


def _composite(name: str) -> Op:
    return Op(name, functions=(name,), kind=Kind.COMPOSITE, payload=None, alike=False)


OPS: tuple[Op, ...] = (
    Op("all_reduce", ("allreduce",)),
    Op("all_reduce_coalesced", ("allreduce_coalesced",)),
    Op("broadcast", ("broadcast",)),
    Op("reduce", ("reduce",)),
    Op("all_gather", ("allgather",)),
    Op("all_gather_coalesced", ("allgather_coalesced",)),
    Op("all_gather_into_tensor", ("_allgather_base", "all_gather_single"), ("_all_gather_base", "all_gather_single")),
    Op("all_gather_into_tensor_coalesced", ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")),
    Op("reduce_scatter", ("reduce_scatter",), payload=1),
    Op(
        "reduce_scatter_tensor",
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        payload=1,
    ),
    Op(
        "reduce_scatter_tensor_coalesced",
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        payload=1,
    ),
    Op("all_to_all", ("alltoall",), payload=1, alike=False),
    Op("all_to_all_single", ("alltoall_base", "all_to_all_single"), payload=1, alike=False),
    Op("gather", ("gather",), payload=1),
    Op("gather_into_tensor", ("gather_into_tensor", "gather_single"), ("gather_single",), payload=1),
    Op("scatter", ("scatter",)),
    Op("barrier", ("barrier",), payload=None),
    Op("monitored_barrier", ("monitored_barrier",), payload=None),
    _point("isend", "send"),
    _point("irecv", "recv", "recv_anysource"),
    Op("end_coalescing", ("_end_coalescing",), ("_coalescing_manager",), Kind.POINT, None, alike=False),
    _composite("send"),
    _composite("recv"),
    _composite("batch_isend_irecv"),
    _composite("all_gather_object"),
    _composite("broadcast_object_list"),
    _composite("gather_object"),
    _composite("scatter_object_list"),
    _composite("send_object_list"),
    _composite("recv_object_list"),
)

# slime's PR #1947 leaves these eight unguarded, under its own names for them.
SLIME_SKIPS = (
    "all_gather_into_tensor",
    "allgather_into_tensor_coalesced",
    "barrier",
    "broadcast_object_list",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "isend",
    "irecv",
)

# What megatron-core calls its groups (``group_desc``) -> a short label for config and metrics; others keep their own name.
GROUP_LABELS = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "optimizer_instance",
    "weights": "weights",
}


def aliases() -> dict[str, Op]:
    """Every name an op goes by, function or method -> the op. ``send`` and ``recv`` are the functions, not the methods."""
    found = {op.name: op for op in OPS}
    for op in OPS:
        for name in (*op.functions, *op.methods):
            found.setdefault(name, op)
    return found


def canonical(key: str, name: str) -> Op:
    """The op that ``name`` stands for. Raises ``ConfigError`` naming ``key`` and every op."""
    known = aliases()
    if name not in known:
        hint = nearest(name, known)
        near = f": {hint}" if hint.startswith("did you mean") else ""
        raise ConfigError(f"{key}: there is no op {name!r}{near}. The ops are {', '.join(op.name for op in OPS)}")
    return known[name]
