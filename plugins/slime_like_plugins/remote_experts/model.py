"""MoE layers with remote experts in an SGLang model. The layers' parameters hold only the local experts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like_plugins.remote_experts.compute import expert_sums, nothing
from slime_like_plugins.remote_experts.experts import RemoteExperts
from slime_like_plugins.remote_experts.placement import LoadRecord, remote_ids
from slime_like_plugins.remote_experts.routing import ExpertRows, TokenBucket, split
from slime_like_plugins.remote_experts.shapes import ExpertShapes

ROWS = "_slime_like_expert_rows"
"""Attribute of a layer: its ``ExpertRows``."""
UNREADABLE = (
    "the weights of an engine with remote experts cannot be read, checked or saved: a worker holds part of the experts, and SGLang "
    "would not read them; serve the model without remote experts"
)
HALVES = {"w1": 0, "w3": 1}
"""Shard of SGLang's loaders -> half of the rows of w13."""


class RemoteModel:
    """MoE layers of this process's model, and their remote experts."""

    def __init__(self, options: RemoteOptions, rank: int, top_k: int | None) -> None:
        self.options = options
        self.experts = RemoteExperts(options, rank)
        self._top_k = top_k
        self._layers: list[Any] = []
        self._sizes: tuple[int, int, torch.dtype] | None = None  # hidden, intermediate, dtype
        self._load = LoadRecord() if options.record_load and rank == 0 else None
        self._lock = threading.Lock()  # SGLang's loaders write from several threads

    def add(self, layer: Any, create: Callable[[int], None], sizes: tuple[int, int, torch.dtype]) -> None:
        """Allocate the local experts of a layer with ``create``, and make its loaders send the other experts to the worker.

        The first call starts the worker, unless the option ``workers`` gives its address. Raises ``ConfigError`` if the placement
        does not fit the layer, ``ValueError`` if the layer is not supported or its experts differ in size or dtype from those of
        earlier layers.
        """
        if problem := obstacle(layer):
            raise ValueError(f"layer {layer.layer_id}: {problem}")
        if self._sizes not in (None, sizes):
            raise ValueError(f"layer {layer.layer_id} has experts of a different size from those of earlier layers")
        self._sizes = sizes
        routed = int(layer.num_global_routed_experts)
        rows = ExpertRows(int(layer.num_experts), remote_ids(self.options, int(layer.layer_id), routed))
        create(rows.num_local)
        setattr(layer, ROWS, rows)
        vars(layer)["_weight_export_error"] = UNREADABLE  # SGLang then refuses to read or save weights
        config = layer.moe_runner_config
        config.num_local_experts = rows.num_local  # so that kernels skip pairs with id -1
        config.inplace = False  # hidden states are still being sent while the local experts are computed
        for name in ("w13_weight", "w2_weight"):
            getattr(layer, name).weight_loader = self._loader(layer, rows)
        self._layers.append(layer)
        if len(self._layers) == 1:
            self.experts.start()

    def open(self) -> None:
        """Connect to the worker if this has not been done. All layers must have been added.

        Raises the errors of ``RemoteExperts.open``.
        """
        with self._lock:
            self._open()

    def _open(self) -> None:
        if self.experts.is_open:
            return
        assert self._sizes is not None
        hidden, intermediate, dtype = self._sizes
        counts = [len(getattr(layer, ROWS).remote) for layer in self._layers]
        selected = min(self._top_k or max(counts), max(counts))
        names = tuple(int(layer.layer_id) for layer in self._layers)
        dtype_name = str(dtype).removeprefix("torch.")
        shapes = ExpertShapes(names, tuple(counts), hidden, intermediate, dtype_name, self.options.capacity, selected)
        self.experts.open(shapes)

    def _loader(self, layer: Any, rows: ExpertRows) -> Callable[..., None]:
        """Return a loader for a layer's parameters, with the signature of SGLang's loader.

        The loader sends remote experts to the worker, and connects to the worker first if necessary.
        """

        def load(parameter: Any, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int) -> None:
            local = int(rows.local_rows[expert_id])
            if local >= 0:
                layer._weight_loader_impl(parameter, loaded_weight, weight_name, shard_id, local)
                return
            # SGLang's own loader writes this rank's part of the expert to a parameter of one expert, with the same layout.
            matrix = torch.nn.Parameter(
                torch.empty((1, *parameter.shape[1:]), dtype=parameter.dtype, device="cpu"), requires_grad=False
            )
            vars(matrix).update(vars(parameter))
            layer._weight_loader_impl(matrix, loaded_weight, weight_name, shard_id, 0)
            name, data, start = "w2", matrix.data[0], 0
            if shard_id in HALVES:
                size = len(data) // 2
                name, start = "w13", HALVES[shard_id] * size
                data = data[start : start + size]
            with self._lock:
                self._open()
                self.experts.write(int(layer.layer_id), name, int(rows.remote_rows[expert_id]), start, data)

        return load

    def forward(self, layer: Any, x_TH: Tensor, topk: Any, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the hidden states after the experts. Raises ``RemoteExpertsLost`` as ``RemoteExperts.add_sums`` does.

        On a GPU, ``compute`` runs SGLang's kernels with the indices of local experts; on a CPU, it is not called.
        """
        rows: ExpertRows = getattr(layer, ROWS)
        ids = topk.topk_ids.to("cpu", torch.int32).numpy()
        weights = topk.topk_weights.to("cpu", torch.float32).numpy()
        if self._load is not None:
            self._load.add(int(layer.layer_id), ids, int(layer.num_global_routed_experts))
        local, buckets = split(ids, weights, rows)

        def compute_local(feed: Callable[[], None]) -> Tensor:
            if x_TH.device.type == "cpu":
                return expert_sums(x_TH, local, weights, layer.w13_weight, layer.w2_weight, feed)
            return compute(torch.from_numpy(local).to(topk.topk_ids)).float()

        if (
            x_TH.device.type != "cpu"
        ):  # SGLang's GPU kernels multiply their sums by this factor; on a CPU, SGLang multiplies later
            buckets = [_scaled(bucket, layer.moe_runner_config.routed_scaling_factor) for bucket in buckets]
        if buckets:
            sums = self.experts.add_sums(int(layer.layer_id), x_TH, buckets, compute_local)
        else:
            sums = compute_local(nothing)
        return sums.to(x_TH.dtype)

    def record_load(self) -> None:
        """Write the number of tokens per expert so far, if the option ``record_load`` is set and this is rank 0."""
        if self._load is not None:
            self._load.write(Path(self.options.record_load))


def obstacle(layer: Any) -> str | None:
    """Return the reason why a layer cannot have remote experts; None if it can."""
    config = layer.moe_runner_config
    if config.activation != "silu" or not config.is_gated or layer.with_bias:
        return f"experts with activation {config.activation}, without a gate or with biases are not supported"
    limits = (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)
    if any(limit is not None for limit in limits):
        return "experts with a clamped or scaled activation are not supported"
    if config.apply_router_weight_on_input or config.no_combine:
        return "router weights on the input, or experts that are not added, are not supported"
    if layer.moe_ep_size > 1:
        return "experts are divided over ranks already (ep_size)"
    return None


def _scaled(bucket: TokenBucket, factor: float | None) -> TokenBucket:
    if factor is None or factor == 1.0:
        return bucket
    return TokenBucket(bucket.tokens, bucket.ids, (bucket.weights * factor).astype(np.float32))
