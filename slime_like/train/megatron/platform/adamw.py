"""AdamW for megatron's optimizers where apex and TransformerEngine are missing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW with torch's fused kernel and one step count per parameter group, as in apex's FusedAdam.

    megatron's DistributedOptimizer restores torch's AdamW with one step tensor shared by all parameters, so each update
    after a resume advances the count once per parameter. A count per group is restored correctly.
    Update rule: Loshchilov and Hutter 2019 (https://arxiv.org/abs/1711.05101); Adam with ``adam_w_mode=False``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        self._kernel: Any = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_  # pyright: ignore[reportPrivateUsage]  torch.optim has no public kernel
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. ``closure`` is ignored."""
        for group in self.param_groups:
            params: list[Tensor] = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in params:
                if not self.state[p]:
                    self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            step = torch.full((), float(group["step"]), device=params[0].device)
            self._kernel(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [step] * len(params),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
