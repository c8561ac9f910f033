"""Lookup of the group advantage that the config names. Errors in user code name the config key and the line.

This file is separate from ``bind`` because the driver, which computes group advantages, does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_like.algo_interfaces import GroupAdvantage
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.errors import UserCodeError
from slime_like.registry import is_path, resolve
from slime_like.types import F32
from slime_like.util.user_code import name_user_errors

GROUP = "algo.group_advantage"


def bind_group_advantage(name: str) -> GroupAdvantage:
    """Return the group advantage ``name``."""
    advantage: GroupAdvantage = resolve(GROUP, name, GROUP_ADVANTAGES)
    return UserGroupAdvantage(name, advantage) if is_path(name) else advantage


@dataclass(frozen=True, slots=True)
class UserGroupAdvantage:
    """Group advantage given by ``module:attribute`` or ``file.py:attribute``. Raises ``UserCodeError`` for errors in it."""

    name: str
    advantage: Callable[[F32], Any]

    def __call__(self, rewards_G: F32) -> F32:
        """Return the advantages. Raises ``UserCodeError`` if the function raises or does not return one number per reward."""
        subject = f"a group with rewards {rewards_G.tolist()}"
        with name_user_errors(GROUP, self.name, subject):
            advantages_G = np.asarray(self.advantage(rewards_G), dtype=np.float32)
        if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
            raise UserCodeError(
                f"{GROUP}={self.name} returned {advantages_G.tolist()!s:.200} for {subject}: return one finite number per reward"
            )
        return advantages_G
