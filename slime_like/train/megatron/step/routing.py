"""Replay of expert choices on one rank: the engines' choices, or those recorded in the pass for old log-probabilities.

Axis suffixes: L tokens of this rank, T tokens of the packed batch, B blocks of the decoder, K experts per token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.resolved import RankSpec
from slime_like.data.routing import ROUTED_EXPERTS, RoutingDifference
from slime_like.metrics.types import Metric
from slime_like.train.megatron.model.expert_choice import ChoiceCounts, ExpertChoice
from slime_like.train.megatron.model.forward import MicroBatch, to_device
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.platform.groups import RankInfo


class RoutingReplay:
    """Replay of expert choices in the routers of one rank's model, as ``algo.routing_replay`` selects."""

    def __init__(self, wrapped: ModelSegments, rank_info: RankInfo, spec: RankSpec) -> None:
        self._rank_info = rank_info
        self._mode = spec.routing_replay
        self._has_old_pass = spec.needs_old_logprobs
        self._in_reference = isinstance(spec.algo, PolicyConfig) and spec.algo.routing_replay_reference
        self._routers: list[tuple[int, Any]] = [  # block and router
            ((int(layer.layer_number) - 1) // 2, layer.mlp.router)
            for policy in wrapped.policies
            for layer in policy.decoder.layers  # pyright: ignore[reportFunctionMemberAccess, reportUnknownVariableType]
            if hasattr(getattr(layer, "mlp", None), "router")
        ]

    def attach(self, micro: MicroBatch) -> MicroBatch:
        """Set ``micro.experts`` to the experts that the engine chose, for this rank's tokens and routers; return ``micro``.

        ``micro`` stays unchanged unless the engine's choices are replayed and the batch contains them.
        """
        experts_TBK = micro.batch.extras.get(ROUTED_EXPERTS)
        if self._mode == "rollout" and experts_TBK is not None:
            experts_LBK = micro.layout.take(experts_TBK, 0)
            if self._rank_info.layout.sequence_parallel:
                experts_LBK = np.split(experts_LBK, self._rank_info.layout.tp)[self._rank_info.tp_rank]
            blocks = [block for block, _ in self._routers]
            micro.experts = to_device(experts_LBK[:, blocks].swapaxes(0, 1).astype(np.int16), self._rank_info.device)
        return micro

    def in_old_pass(self, micros: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Replay the engine's expert choices in the pass for old log-probabilities if ``routing_replay=rollout``.

        With ``routing_replay=old``, record the experts that the routers choose in this pass.
        """
        return self.record(micros) if self._mode == "old" else self.replay(micros, compare=True)

    def in_reference_pass(self, micros: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Replay the engine's expert choices in the reference's pass if ``algo.routing_replay_reference`` is set."""
        return self.replay(micros if self._in_reference else (), compare=False)

    def in_training(self, micros: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Replay experts in the optimizer steps.

        The engine's experts are compared with the routers' own only if there is no pass for old log-probabilities, because
        that pass would already have compared them. Experts that the pass recorded are always compared.
        """
        return self.replay(micros, compare=self._mode == "old" or not self._has_old_pass)

    @contextmanager
    def replay(self, micros: Sequence[MicroBatch], *, compare: bool) -> Generator[None]:
        """Replay the experts of the ``micros`` that have some; the routers choose as usual for the others.

        With ``compare``, count the tokens for which a router would choose other experts than the replayed ones.
        """
        by_address = {_address(micro): micro.experts for micro in micros if micro.experts is not None}
        for index, choice in enumerate(self._choices()):
            choice.replayed_experts = {address: experts[index] for address, experts in by_address.items()}
            choice.compares = compare
        try:
            yield
        finally:
            for choice in self._choices():
                choice.replayed_experts, choice.compares = {}, False

    @contextmanager
    def record(self, micros: Sequence[MicroBatch]) -> Generator[None]:
        """Record the experts that the routers choose for ``micros``, and store them in each ``MicroBatch.experts``."""
        for choice in self._choices():
            choice.recorded_experts = {}
        try:
            yield
            recorded = [choice.recorded_experts or {} for choice in self._choices()]
            for micro in micros if recorded else ():
                micro.experts = torch.stack([by_address[_address(micro)] for by_address in recorded])
        finally:
            for choice in self._choices():
                choice.recorded_experts = None

    def metrics(self) -> tuple[Metric, ...]:
        """Return metrics of how replayed experts differed from the routers' own choices since the last call.

        The result is () with ``routing_replay=off``; otherwise, this is a collective.
        """
        return () if self._mode == "off" else self.difference().metrics("train")

    def difference(self) -> RoutingDifference:
        """Return how replayed experts differed from the routers' own choices since the last call, the same on all ranks.

        A collective.
        """
        device = self._rank_info.device
        sums_2, maxima_2 = (torch.zeros(2, dtype=torch.float64, device=device) for _ in range(2))
        for _, router in self._routers:
            counts, router.router_replay.counts = router.router_replay.counts, ChoiceCounts()
            pair = torch.stack([_float64(value, device) for value in (counts.num_tokens, counts.num_different)])
            gap = _float64(counts.max_gap, device)
            dist.all_reduce(pair, group=router.tp_dp_cp_group)
            dist.all_reduce(gap, op=dist.ReduceOp.MAX, group=router.tp_dp_cp_group)
            share = pair[1] / pair[0].clamp(min=1.0)
            sums_2 += torch.stack((torch.ones_like(share), share))
            maxima_2 = torch.maximum(maxima_2, torch.stack((share, gap)))
        dist.all_reduce(sums_2, group=self._rank_info.pp_group)
        dist.all_reduce(maxima_2, op=dist.ReduceOp.MAX, group=self._rank_info.pp_group)
        num_layers, share = sums_2.tolist()
        max_share, max_gap = maxima_2.tolist()
        return RoutingDifference(share / max(num_layers, 1.0), max_share, max_gap)

    def _choices(self) -> list[ExpertChoice]:
        return [router.router_replay for _, router in self._routers]


def _address(micro: MicroBatch) -> int:
    assert micro.packed.padding is not None
    return micro.packed.padding.data_ptr()


def _float64(value: Tensor | float, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).clone()
