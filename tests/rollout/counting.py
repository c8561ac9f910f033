"""Infinite data source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slime_like.types import Prompt


class Counting:
    """Data source of prompts 0, 1, 2, ... with one to three tokens plus ``extra``."""

    def __init__(self, extra: int = 0) -> None:
        self._extra = extra
        self._position = 0

    def __len__(self) -> int:
        return 10**6

    def next(self, num_prompts: int) -> list[Prompt]:
        first, self._position = self._position, self._position + num_prompts
        return [self._prompt(i) for i in range(first, self._position)]

    def _prompt(self, i: int) -> Prompt:
        token_ids = np.arange(2, 3 + self._extra + i % 3, dtype=np.int32)
        return Prompt(i, token_ids, "", None, None)

    def metrics(self) -> tuple[()]:
        return ()

    def state(self) -> dict[str, Any]:
        return {"taken": self._position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._position = state["taken"]
