"""Mixture-of-experts mix-in: a router, routed experts and an optional shared expert replace the MLP of some or all blocks.

Experts are divided over expert parallel ranks, and their matrices over expert tensor parallel ranks. An export has separate
matrices per expert (``experts.3.gate_proj.weight``), as transformers writes and SGLang's loaders read. An HF folder that is
loaded may instead have two tensors per block that fuse the matrices of all experts: one for gate and up, one for down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from slime_like.errors import ConfigError
from slime_like.train.megatron.families.base import Replicated, RowParallel, Shape, Stacked, Weight
from slime_like.train.megatron.families.dense import DenseDecoder
from slime_like.train.megatron.families.hf import HFFolder


@dataclass(frozen=True, slots=True)
class ExpertMatrix(Weight):
    """Either gate and up of a routed expert, stacked and each split by rows, or its down matrix, split by columns."""

    fused: str  # name of the fused tensor [experts, rows, columns], which the folder may have instead
    expert: int
    num_experts: int

    def read(self, folder: HFFolder) -> list[Tensor]:
        if folder.has(self.names[0]) or not folder.has(self.fused):
            return Weight.read(self, folder)
        rows, columns = sum(shape[0] for shape in self.shapes), self.shapes[0][1]
        stacked = folder.part(self.fused, (self.num_experts, rows, columns), self.expert)
        return list(stacked.split([shape[0] for shape in self.shapes]))

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return self._kind.split(self, tensors, tp, rank)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self._kind.merge(self, shards)

    @property
    def _kind(self) -> type[Weight]:
        return RowParallel if len(self.names) == 1 else Stacked

    @property
    def is_expert(self) -> bool:
        return True


class Experts(DenseDecoder):
    """Mix-in for a decoder family. Experts replace the MLP in the blocks for which ``is_sparse`` is true.

    By default, tensors are named as in transformers' ``*SparseMoeBlock``: ``mlp.gate``, ``mlp.experts``, ``mlp.shared_expert``.
    """

    expert_block: ClassVar[str] = "mlp"  # name of router and experts in a decoder layer
    gate_up_names: ClassVar[tuple[str, str]] = ("gate_proj", "up_proj")
    down_name: ClassVar[str] = "down_proj"
    shared_name: ClassVar[str] = "shared_expert"
    shared_gate: ClassVar[bool] = True  # True: a sigmoid gate scales the output of the shared expert

    def check_mlp(self) -> None:
        if not all(self.sparse):
            super().check_mlp()
        if not any(self.sparse):
            return
        top_k, num_experts = int(self.hf.num_experts_per_tok), self.num_experts
        if not 0 < top_k <= num_experts:
            raise ConfigError(
                f"config.json: num_experts_per_tok={top_k} of {num_experts} experts: choose 1 to {num_experts}"
            )
        if top_k == 1 and self.renormalises:
            raise ConfigError(
                "config.json: num_experts_per_tok=1 with norm_topk_prob=true: the single weight is always 1, so the "
                "router would learn nothing; set norm_topk_prob=false"
            )
        if self.shared_size:
            self.require_divisible("shared expert size", self.shared_size)

    @property
    def num_experts(self) -> int:
        return int(self.hf.num_experts) if any(self.sparse) else 0

    @property
    def expert_size(self) -> int:
        """Intermediate size of a routed expert."""
        return int(self.hf.moe_intermediate_size)

    @property
    def mlp_size(self) -> int:
        return self.expert_size if all(self.sparse) else super().mlp_size

    @property
    def shared_size(self) -> int:
        """Intermediate size of the shared expert; 0 if there is none."""
        return int(getattr(self.hf, "shared_expert_intermediate_size", 0) or 0)

    @property
    def renormalises(self) -> bool:
        """True if the routing weights of a token's experts are normalised to a sum of 1, before any scaling factor."""
        return bool(getattr(self.hf, "norm_topk_prob", True))

    def is_sparse(self, block: int) -> bool:
        """Return True if the block has experts instead of an MLP."""
        step = int(getattr(self.hf, "decoder_sparse_step", None) or 1)
        return block not in (getattr(self.hf, "mlp_only_layers", None) or ()) and (block + 1) % step == 0

    @cached_property  # cached because it is read for every expert of every block
    def sparse(self) -> tuple[bool, ...]:
        """Result of ``is_sparse`` for each block."""
        return tuple(self.is_sparse(block) for block in range(int(self.hf.num_hidden_layers)))

    def blocks(self) -> tuple[str, ...]:
        pairs = zip(super().blocks(), self.sparse, strict=True)
        return tuple(f"{block[0]}E" if sparse else block for block, sparse in pairs)

    def transformer_fields(self) -> dict[str, Any]:
        fields = super().transformer_fields()
        if not self.num_experts:
            return fields
        fields |= self.router_fields()
        if self.shared_size:
            fields |= {
                "moe_shared_expert_intermediate_size": self.shared_size,
                "moe_shared_expert_gate": self.shared_gate,
            }
        return fields

    def router_fields(self) -> dict[str, Any]:
        """Return the fields of megatron's TransformerConfig for the router and the routed experts."""
        return {
            "num_moe_experts": self.num_experts,
            "moe_router_topk": int(self.hf.num_experts_per_tok),
            "moe_ffn_hidden_size": self.expert_size,
            "moe_router_score_function": "softmax",
            # The softmax over the chosen experts equals the renormalised softmax over all experts.
            "moe_router_pre_softmax": not self.renormalises,
            "moe_token_dropping": False,
        }

    def mlp(self, block: int, prefix: str) -> dict[str, Weight]:
        if not self.is_sparse(block):
            return super().mlp(block, prefix)
        hidden, size, mlp = int(self.hf.hidden_size), self.expert_size, f"{prefix}.{self.expert_block}"
        norm = Replicated((f"{prefix}.post_attention_layernorm.weight",), ((hidden,),))
        router = Replicated((f"{mlp}.gate.weight",), ((self.num_experts, hidden),))
        out: dict[str, Weight] = {"pre_mlp_layernorm.weight": norm, "mlp.router.weight": router}
        for e in range(self.num_experts):
            expert = f"{mlp}.experts.{e}"
            gate_up = tuple(f"{expert}.{name}.weight" for name in self.gate_up_names)
            out[f"{EXPERTS}{e}.linear_fc1.weight"] = self._expert(
                gate_up, ((size, hidden),) * 2, "gate_up_proj", mlp, e
            )
            down = (f"{expert}.{self.down_name}.weight",)
            out[f"{EXPERTS}{e}.linear_fc2.weight"] = self._expert(down, ((hidden, size),), "down_proj", mlp, e)
        return out | (self._shared_expert(mlp) if self.shared_size else {})

    def _expert(self, names: tuple[str, ...], shapes: tuple[Shape, ...], fused: str, mlp: str, e: int) -> Weight:
        return ExpertMatrix(names, shapes, f"{mlp}.experts.{fused}", e, self.num_experts)

    def _shared_expert(self, mlp: str) -> dict[str, Weight]:
        hidden, size, expert = int(self.hf.hidden_size), self.shared_size, f"{mlp}.{self.shared_name}"
        gate_up = (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
        out: dict[str, Weight] = {
            "mlp.shared_experts.linear_fc1.weight": Stacked(gate_up, ((size, hidden),) * 2),
            "mlp.shared_experts.linear_fc2.weight": RowParallel((f"{expert}.down_proj.weight",), ((hidden, size),)),
        }
        if self.shared_gate:
            gate = Replicated((f"{mlp}.{self.shared_name}_gate.weight",), ((1, hidden),))
            out["mlp.shared_experts.gate_weight"] = gate
        return out


# ---- keys ------------------------------------------------------------------------------------------------------------
EXPERTS = "mlp.experts."  # in our keys, before the global index: blocks.3.mlp.experts.7.linear_fc1.weight
_LOCAL = "mlp.experts.local_experts."  # in megatron's names, before the index within one rank


def global_key(key: str, num_local: int, ep_rank: int) -> str:
    """Replace ``local_experts`` and the local index in megatron's ``key`` by the global index; return other keys unchanged."""
    prefix, local, numbered = key.partition(_LOCAL)
    if not local:
        return key
    index, _, suffix = numbered.partition(".")
    return f"{prefix}{EXPERTS}{int(index) + num_local * ep_rank}.{suffix}"


def keys_of_peers(key: str, num_experts: int, ep: int) -> tuple[str, ...]:
    """Return the keys on all expert parallel ranks, in rank order, that correspond to ``key`` on this rank.

    For a parameter outside the routed experts, that is ``key`` alone.
    """
    prefix, expert, numbered = key.partition(EXPERTS)
    if not expert:
        return (key,)
    index, _, suffix = numbered.partition(".")
    num_local = num_experts // ep
    return tuple(f"{prefix}{EXPERTS}{int(index) % num_local + num_local * rank}.{suffix}" for rank in range(ep))
