"""Communication ops that ``slime_like.distributed`` wraps, with their canonical names, methods and aliases.

This module does not import torch, so that ``guard.ops.<op>`` can be checked when a config is loaded. Names follow
``torch.distributed`` 2.14.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slime_like.errors import ConfigError
from slime_like.registry import closest


class Kind(StrEnum):
    """Kind of op: called by all ranks of the group, called by some of them, or composed of other ops."""

    COLLECTIVE = "collective"  # every rank of the group calls it, in the same order
    POINT = "point"  # some ranks of the group call it: a sender and a receiver, or the ranks of a batch of sends
    COMPOSITE = "composite"  # a function that calls other ops, which are counted too


@dataclass(frozen=True, slots=True)
class Op:
    """Communication op. ``methods`` are the ``ProcessGroup`` methods that issue it.

    Wrapping the methods covers every caller except functional collectives, which reach a group in C++.

    A composite, an op that calls other ops, has no methods. Its ``functions`` in torch.distributed are wrapped instead, and its
    policy covers the ops that it calls.
    """

    name: str
    methods: tuple[str, ...] = ()
    functions: tuple[
        str, ...
    ] = ()  # functions of torch.distributed in addition to ``name``; for a composite, the wrapped functions
    kind: Kind = Kind.COLLECTIVE
    payload: int | None = 0  # index of the argument whose bytes count; None: no payload
    equal_sizes: bool = True  # all ranks pass the same number of bytes


def _point(name: str, *methods: str) -> Op:
    return Op(name, methods, kind=Kind.POINT, equal_sizes=False)


def _composite(name: str) -> Op:
    return Op(name, functions=(name,), kind=Kind.COMPOSITE, payload=None, equal_sizes=False)


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
    Op("all_to_all", ("alltoall",), payload=1, equal_sizes=False),
    Op("all_to_all_single", ("alltoall_base", "all_to_all_single"), payload=1, equal_sizes=False),
    Op("gather", ("gather",), payload=1),
    Op("gather_into_tensor", ("gather_into_tensor", "gather_single"), ("gather_single",), payload=1),
    Op("scatter", ("scatter",)),
    Op("barrier", ("barrier",), payload=None),
    Op("monitored_barrier", ("monitored_barrier",), payload=None),
    _point("isend", "send"),
    _point("irecv", "recv", "recv_anysource"),
    Op("end_coalescing", ("_end_coalescing",), ("_coalescing_manager",), Kind.POINT, None, equal_sizes=False),
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

# slime's PR #1947 leaves these eight unguarded (names as in slime).
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

# megatron-core's ``group_desc`` -> short label in config and metrics; other groups keep their name.
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
    """Return a dict from each name of an op to the op: canonical names, and aliases (functions and methods).

    The names ``send`` and ``recv`` refer to the functions of torch.distributed, not to the methods.
    """
    ops_by_name = {op.name: op for op in OPS}
    for op in OPS:
        for name in (*op.functions, *op.methods):
            ops_by_name.setdefault(name, op)
    return ops_by_name


def canonical(key: str, name: str) -> Op:
    """Return the op called ``name``. Raises ``ConfigError`` naming ``key`` and all ops if there is none."""
    ops_by_name = aliases()
    if name not in ops_by_name:
        close = closest(name, ops_by_name)
        near = f": did you mean {close!r}?" if close else "."
        raise ConfigError(f"{key}: there is no op {name!r}{near} The ops are {', '.join(op.name for op in OPS)}")
    return ops_by_name[name]
