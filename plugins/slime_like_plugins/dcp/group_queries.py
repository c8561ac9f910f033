"""Queries of a whole DCP group, computed on each of its ranks (``rollout.dcp_replicate_q``).

In a decode step, a rank computes attention for the query heads of all ranks of its group. The hidden states are the same on
all ranks, so a rank with copies of the other ranks' query projections computes these queries itself, instead of gathering them.
The design follows SGLang's ``dcp_replicate_q_proj``, which exists only for models with multi-head latent attention.
SGLang makes the copies once; here they are refreshed after each weight push.

Axes: T tokens, A query heads of all ranks of the group, D head dimension, C hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.config.schema.dcp import replicated_q_obstacle
from slime_like_plugins.dcp.exchange_time import unmeasured
from slime_like_plugins.plugin_names import DCP


class GroupQueries:
    """Weights of the query projections of all ranks of a group for one attention module; a call computes the queries."""

    def __init__(self, attention: Any, group: Any) -> None:
        self._attention, self._group = attention, group
        self._hidden_TC: Tensor | None = None  # input of the module's projection, kept until its attention runs
        self._weight, self._bias = torch.empty(0), None
        self._source: Tensor | None = None  # the module's own weight at the last gather, with its version
        self._source_version = -1
        attention.qkv_proj.register_forward_pre_hook(self._remember)

    def __call__(self, positions_T: Tensor) -> Tensor:
        """Return the queries [T, A, D] for the last input of the module's projection, and release that input.

        Collective over the DCP group when ``_renew`` gathers the projections.
        """
        self._renew()
        attention, hidden_TC = self._attention, self._hidden_TC
        assert hidden_TC is not None, "the module's projection runs before its attention"
        self.release()
        tokens, dim = len(hidden_TC), attention.head_dim
        q = F.linear(hidden_TC, self._weight, self._bias)
        if getattr(attention, "q_norm", None) is not None:
            q = attention.q_norm(q.view(-1, dim)).view(tokens, -1)
        q, _ = attention.rotary_emb(positions_T, q, q[:, :dim].clone())  # the operator also needs a key
        return q.view(tokens, -1, dim)

    def release(self) -> None:
        """Release the hidden states, so that a prefill does not keep those of every layer."""
        self._hidden_TC = None

    def _remember(self, projection: Any, inputs: tuple[Tensor, ...]) -> None:
        self._hidden_TC = inputs[0]

    def _renew(self) -> None:
        """Gather the query projections at the first call and at the first call after a weight push.

        Each gather is a collective over the DCP group. All ranks gather together, because a push overwrites every parameter
        on all ranks before any of them decodes.
        """
        projection, size = self._attention.qkv_proj, self._attention.q_size
        source = projection.weight
        if source is self._source and source._version == self._source_version:
            return
        bias = getattr(projection, "bias", None)
        gather = unmeasured(self._group, "all_gather")
        self._weight = gather(source.detach()[:size].contiguous(), dim=0)
        self._bias = None if bias is None else gather(bias.detach()[:size].contiguous(), dim=0)
        self._source, self._source_version = source, source._version


def group_queries(model: Any, group: Any) -> dict[int, GroupQueries]:
    """Return the query projections of each attention layer of ``model``, by layer id.

    Each ``GroupQueries`` registers a hook on its layer's ``qkv_proj`` that keeps the last input. Raises ``SystemExit`` if a layer
    has output gates in this projection, or a norm over the queries of several heads.
    """
    modules = [module for module in model.modules() if hasattr(module, "qkv_proj") and hasattr(module, "attn")]
    for module in modules:
        if reason := _obstacle(module):
            raise SystemExit(
                f"slime_like plugin {DCP!r}: rollout.dcp_replicate_q: {reason}; set rollout.dcp_replicate_q=false "
                "(remove --dcp-replicate-q-proj)"
            )
    return {module.attn.layer_id: GroupQueries(module, group) for module in modules}


def _obstacle(attention: Any) -> str | None:
    """Return why ``GroupQueries`` would compute wrong queries for a module; None if it would not."""
    norm_weight = getattr(getattr(attention, "q_norm", None), "weight", None)
    num_rows = attention.q_size + 2 * attention.kv_size  # of a projection without gates
    return replicated_q_obstacle(
        "cpu",
        "a2a",
        output_gates=len(attention.qkv_proj.weight) > num_rows,
        projection_norms=norm_weight is not None and norm_weight.numel() != attention.head_dim,
    )
