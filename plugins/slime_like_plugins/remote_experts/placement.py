"""Choice of remote experts by count, by list or by least measured load, and the token counts that measure this load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slime_like.config.schema.expert_load import FIX, read_load
from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.remote_experts.compute import Ids


def remote_ids(options: RemoteOptions, layer: int, num_experts: int) -> tuple[int, ...]:
    """Return the ascending ids of a layer's remote experts among ``num_experts`` routed ones.

    Raises ``ConfigError`` if no expert would be left in the engine, if a listed expert does not exist, or if the load file cannot
    be read or does not fit the layer.
    """
    if options.experts:
        if max(options.experts) >= num_experts:
            raise ConfigError(
                f"rollout.remote_experts.experts has {max(options.experts)}, but layer {layer} has {num_experts} experts: give ids from "
                f"0 to {num_experts - 1}"
            )
        if len(options.experts) == num_experts:
            raise ConfigError(
                f"rollout.remote_experts.experts has all {num_experts} experts of layer {layer}: remove an id, because at least one "
                "expert must stay in the engine"
            )
        return tuple(sorted(options.experts))
    if options.count >= num_experts:
        raise ConfigError(
            f"rollout.remote_experts.count={options.count}, but layer {layer} has {num_experts} experts, of which at least one must "
            f"stay in the engine: set rollout.remote_experts.count to at most {num_experts - 1}"
        )
    if not options.load_file:
        return tuple(range(num_experts - options.count, num_experts))
    loads = read_load(Path(options.load_file)).get(layer)
    if loads is None or len(loads) != num_experts:
        num_text = "no" if loads is None else f"{len(loads)}"
        raise ConfigError(
            f"rollout.remote_experts.load_file={options.load_file} has {num_text} experts of layer {layer}, which has "
            f"{num_experts}: {FIX}"
        )
    return tuple(sorted(np.argsort(np.asarray(loads), kind="stable")[: options.count].tolist()))


class LoadRecord:
    """Token counts: how many tokens each layer has routed to each expert so far."""

    def __init__(self) -> None:
        self._tokens: dict[int, NDArray[np.int64]] = {}

    def add(self, layer: int, ids: Ids, num_experts: int) -> None:
        """Count a batch's tokens per routed expert. Ids outside of [0, ``num_experts``), e.g. of shared experts, are ignored."""
        counts = np.bincount(ids[(ids >= 0) & (ids < num_experts)], minlength=num_experts)
        self._tokens[layer] = self._tokens[layer] + counts if layer in self._tokens else counts

    def write(self, path: Path) -> None:
        """Write the counts as JSON to ``path``, replacing the file atomically."""
        tokens = {str(layer): counts.tolist() for layer, counts in sorted(self._tokens.items())}
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"tokens": tokens}))
        part.replace(path)
