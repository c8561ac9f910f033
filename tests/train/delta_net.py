"""Rank functions of test_delta_net: one Gated DeltaNet layer in float64, compared with the recurrence."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.families.base import Weight
from slime_like.util.ports import RendezvousAddress
from tests.gdn.recurrence import RecurrenceCase, conv_reference, recurrence
from tests.train.faults import FAULTS
from tests.train.jobs import Shared
from tests.train.models import make_rows, make_spec
from tests.train.ranks import RankWorld

HIDDEN, VALUE_HEADS, KEY, VALUE, WIDTH = 24, 8, 8, 6, 4
LENGTHS = (37, 1, 5, 60, 2)
UNUSED_FOLDER = Path("no checkpoint")
NET = "model.layers.0.linear_attn"


@dataclass(frozen=True, slots=True)
class LayerCase:
    """A layout and the settings of its layer."""

    layout: Layout
    mode: str = "head"  # model.gdn.cp_mode
    decay: float = 1.0  # size of the log decays
    fault: str | None = None  # key in FAULTS of the fault to inject
    key_heads: int = 4


@dataclass(frozen=True, slots=True)
class LayerReference:
    """Inputs of the full layer for T tokens, and its output and gradients by definition."""

    hidden: Tensor  # [T, D]
    upstream: Tensor  # [T, D], gradient of the output
    out: Tensor  # [T, D]
    hidden_grad: Tensor  # [T, D]
    grads: dict[str, Tensor]  # HF name -> full gradient


References = dict[tuple[Any, ...], LayerReference]


def errors(world: RankWorld, shared: Shared, cases: Sequence[LayerCase]) -> list[dict[str, float]]:
    """Return per case this rank's largest errors of output and gradients, relative to the largest entry on any rank."""
    del shared
    errors_of_cases: list[dict[str, float]] = []
    references: References = {}
    for case in cases:
        with FAULTS[case.fault]() if case.fault else contextlib.nullcontext():
            errors_of_cases.append(_errors(world, case, references))
    return errors_of_cases


def _errors(world: RankWorld, case: LayerCase, references: References) -> dict[str, float]:
    from slime_like.train.megatron.model.forward import make_micro
    from slime_like.train.megatron.platform import groups

    sizes = case.layout
    rank_info = groups.join_and_make_groups(
        make_spec(UNUSED_FOLDER, sizes),
        rank=world.rank,
        world_size=world.size,
        master=RendezvousAddress(world.host, world.port),
    )
    micro = make_micro(make_rows(LENGTHS, seed=0), rank_info)
    bounds, local_index = micro.layout.padded_cu_seqlens, torch.from_numpy(micro.layout.local_index)
    layer, table = _layer(rank_info, case)
    full = _weights(table, case.decay)
    for name, parameter in layer.named_parameters():
        weight = table[name]
        parameter.data = weight.split([full[n].detach() for n in weight.names], sizes.tp, rank_info.tp_rank)
    if sizes.sequence_parallel:
        local_index = local_index.chunk(sizes.tp)[rank_info.tp_rank]
    reference = _reference(world, full, bounds, layer.out_norm.eps, case, references)
    local = reference.hidden[local_index].requires_grad_()
    out = layer(local[:, None], packed_seq_params=micro.packed)[0][:, 0]
    (out * reference.upstream[local_index]).sum().backward()
    assert local.grad is not None
    errors_of_part = {
        "out": _relative(out, reference.out[local_index], reference.out),
        "hidden": _relative(local.grad, reference.hidden_grad[local_index], reference.hidden_grad),
    }
    for name, parameter in layer.named_parameters():
        full_grads = [reference.grads[n] for n in table[name].names]
        _reduce_gradient(parameter, rank_info)
        errors_of_part[name] = _relative(
            parameter.grad, table[name].split(full_grads, sizes.tp, rank_info.tp_rank), *full_grads
        )
    return errors_of_part


def _layer(rank_info: Any, case: LayerCase) -> tuple[Any, Mapping[str, Weight]]:
    """Return the layer with uninitialised weights, and the ``Weight`` of each of its parameters."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module
    from transformers import Qwen3_5TextConfig

    from slime_like.train.megatron.families.qwen3_5 import Qwen35
    from slime_like.train.megatron.model.transformer_config import transformer_config
    from slime_like_plugins.qwen_gdn.spec import layer_spec

    hf = Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        linear_num_key_heads=case.key_heads,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=WIDTH,
    )
    family = Qwen35(hf, rank_info.layout.tp)
    actor_spec = make_spec(UNUSED_FOLDER, rank_info.layout, model={"gdn": GDNConfig(cp_mode=case.mode)})
    config = transformer_config(actor_spec, family)
    config.params_dtype = torch.float64
    spec: Any = layer_spec(config, actor_spec.model, rank_info)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer: Any = build_module(spec.submodules.self_attention, config, layer_number=1, pg_collection=groups)
    start = "blocks.0.self_attention."
    return layer.double(), {k.removeprefix(start): w for k, w in family.weights().items() if k.startswith(start)}


def _weights(table: Mapping[str, Weight], decay: float) -> dict[str, Tensor]:
    """Return random HF tensors, with log decays per token of about ``-decay``."""
    out: dict[str, Tensor] = {}
    for weight in table.values():
        for name, shape in zip(weight.names, weight.shapes, strict=True):
            tensor = _normal(len(out) + 10, *shape) * (0.4 if len(shape) > 1 else 1.0)
            if name.endswith("A_log"):
                tensor = tensor * 0.3 + float(np.log(decay))
            out[name] = tensor.requires_grad_()
    return out


def _reference(
    world: RankWorld,
    full: Mapping[str, Tensor],
    bounds: np.ndarray,
    eps: float,
    case: LayerCase,
    references: References,
) -> LayerReference:
    """Return the reference of ``case`` with the weights ``full``. Collective: one rank computes a new one for all."""
    key = (tuple(bounds.tolist()), eps, case.decay, case.key_heads)
    if key not in references:
        source = len(references) % world.size
        box: list[Any] = [None]
        if world.rank == source:
            hidden, upstream = _normal(1, int(bounds[-1]), HIDDEN), _normal(2, int(bounds[-1]), HIDDEN)
            out = layer_reference(hidden.requires_grad_(), full, bounds, eps, case.key_heads)
            (out * upstream).sum().backward()
            grads: dict[str, Any] = {name: tensor.grad for name, tensor in full.items()}
            assert hidden.grad is not None
            box = [LayerReference(hidden.detach(), upstream, out.detach(), hidden.grad, grads)]
        dist.broadcast_object_list(box, source)
        references[key] = box[0]
    return references[key]


def layer_reference(
    hidden_TD: Tensor, full: Mapping[str, Tensor], bounds: np.ndarray, eps: float, key_heads: int
) -> Tensor:
    """Compute Qwen3.5's layer by definition: projections, convolution, recurrence per token, gated norm, projection."""
    part = {name.removeprefix(f"{NET}.").removesuffix(".weight"): tensor for name, tensor in full.items()}
    edges = tuple(int(b) for b in bounds)
    qkv, z, b, a = (hidden_TD @ part[f"in_proj_{name}"].T for name in ("qkv", "z", "b", "a"))
    mixed = conv_reference(qkv[None], part["conv1d"][:, 0], edges, None, True)[0]
    q, k, v = mixed.split((key_heads * KEY, key_heads * KEY, VALUE_HEADS * VALUE), -1)
    decay = -part["A_log"].exp() * F.softplus(a + part["dt_bias"])
    heads = {"q": q.unflatten(-1, (key_heads, KEY)), "k": k.unflatten(-1, (key_heads, KEY))}
    heads["v"] = v.unflatten(-1, (VALUE_HEADS, VALUE))
    rule = RecurrenceCase(
        **{n: t[None] for n, t in heads.items()}, g=decay[None], beta=b.sigmoid()[None], initial=None, cu_seqlens=edges
    )
    retrieval = recurrence(rule)[0][0]
    normed = retrieval * (retrieval.square().mean(-1, keepdim=True) + eps).rsqrt() * part["norm"]
    return (normed * F.silu(z.unflatten(-1, (VALUE_HEADS, VALUE)))).flatten(1) @ part["out_proj"].T


def _reduce_gradient(parameter: Any, rank_info: Any) -> None:
    """Reduce a gradient as an optimizer step does: over the cp ranks, and over tp if sequence parallelism marks it."""
    if rank_info.layout.cp > 1:
        dist.all_reduce(parameter.grad, group=rank_info.cp_group)
    if getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(parameter.grad, group=rank_info.tp_group)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _relative(actual: Tensor, expected: Tensor, *references: Tensor) -> float:
    return float(
        (actual.detach() - expected).abs().max() / max(float(t.abs().max()) for t in (references or (expected,)))
    )
