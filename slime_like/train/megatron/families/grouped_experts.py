"""Experts in groups, chosen by softmax scores (DeepSeek-V2) or sigmoid scores with a bias (DeepSeek-V3, Kimi K2, GLM-4.5)."""

from __future__ import annotations

from typing import Any, ClassVar

from slime_like.errors import ConfigError
from slime_like.train.megatron.families.base import Replicated, Weight
from slime_like.train.megatron.families.experts import Experts


class GroupedExperts(Experts):
    """Mix-in for a decoder family with routed and shared experts after the first layers.

    The routing weights of a token's experts come from ``score_function``: by default a softmax over all routed experts,
    not normalised over the chosen ones. They are multiplied by routed_scaling_factor. A token's experts are chosen from
    the topk_group groups with the highest scores, or from all groups if topk_method is greedy or there is only one group.
    """

    shared_name = "shared_experts"
    shared_gate = False
    shape_keys = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")
    score_function: ClassVar[str] = "softmax"
    topk_methods: ClassVar[tuple[str, ...]] = ("greedy", "group_limited_greedy")
    num_group_scores: ClassVar[int] = 1
    """Number of best scores whose sum ranks a group; ``moe.expert_choice`` sums as many for this score function."""

    def __init__(self, hf: Any, tp: int) -> None:
        super().__init__(hf, tp)
        first, extra = int(hf.num_hidden_layers), int(getattr(hf, "num_nextn_predict_layers", None) or 0)
        self.untrained_prefixes = tuple(f"model.layers.{layer}." for layer in range(first, first + extra))
        self.require("scoring_func", self.score_function)
        self.require("topk_method", *self.topk_methods)
        self.require("norm_topk_prob", self.renormalises)
        if self.num_experts and self.groups is not None:
            self._check_groups(*self.groups)

    def _check_groups(self, groups: int, num_chosen: int) -> None:
        size, top_k = self.num_experts // max(1, groups), int(self.hf.num_experts_per_tok)
        if groups < 1 or self.num_experts % groups or not 0 < num_chosen <= groups:
            problem = "n_group must divide the experts, and topk_group be between 1 and n_group"
        elif size < self.num_group_scores or num_chosen * size < top_k:
            problem = f"a group has {size} experts, too few to rank groups or to choose {top_k} experts"
        else:
            return
        raise ConfigError(
            f"config.json: n_group={groups}, topk_group={num_chosen} of {self.num_experts} experts: {problem}; "
            "use the config.json that belongs to these weights"
        )

    @property
    def num_experts(self) -> int:
        return int(self.hf.n_routed_experts) if any(self.sparse) else 0

    @property
    def shared_size(self) -> int:
        return int(self.hf.n_shared_experts or 0) * self.expert_size

    @property
    def renormalises(self) -> bool:
        return False

    @property
    def groups(self) -> tuple[int, int] | None:
        """(Number of groups, number of groups to which a token's experts are limited).

        None if topk_method is greedy or there is only one group.
        """
        if getattr(self.hf, "topk_method", None) == "greedy" or int(self.hf.n_group or 1) == 1:
            return None
        return int(self.hf.n_group), int(self.hf.topk_group or 0)

    def is_sparse(self, block: int) -> bool:
        moe_interval = int(getattr(self.hf, "moe_layer_freq", None) or 1)
        return block >= int(self.hf.first_k_dense_replace or 0) and block % moe_interval == 0

    def router_fields(self) -> dict[str, Any]:
        groups, num_chosen = self.groups or (None, None)
        return {
            **super().router_fields(),
            "moe_router_score_function": self.score_function,
            "moe_router_topk_scaling_factor": float(self.hf.routed_scaling_factor),
            "moe_router_num_groups": groups,
            "moe_router_group_topk": num_chosen,
        }


class BiasedExperts(GroupedExperts):
    """``GroupedExperts`` with a bias per expert (https://arxiv.org/abs/2408.15664).

    Experts are chosen by sigmoid scores plus biases. Their outputs are weighted by the scores alone, normalised over
    the chosen experts and then scaled. Groups are ranked by the sum of their two best biased scores.
    """

    score_function = "sigmoid"
    topk_methods = ("noaux_tc",)
    num_group_scores = 2

    @property
    def renormalises(self) -> bool:
        return True

    def router_fields(self) -> dict[str, Any]:
        return {**super().router_fields(), "moe_router_enable_expert_bias": True}

    def mlp(self, block: int, prefix: str) -> dict[str, Weight]:
        weights = super().mlp(block, prefix)
        if self.is_sparse(block):
            name = f"{prefix}.mlp.gate.e_score_correction_bias"
            weights["mlp.router.expert_bias"] = Replicated((name,), ((self.num_experts,),))
        return weights
