"""Load file: number of tokens per layer and expert, recorded by an engine and used to choose the remote experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile

FIX = "record it again with rollout.remote_experts.record_load"


def read_load(path: Path) -> dict[int, list[int]]:
    """Read a load file. Return a dict from layer to the number of tokens of each of its experts.

    Raises ``ConfigError`` if the file is missing or damaged, or contains no layer.
    """
    file = InputFile(path, ConfigError, FIX, key="rollout.remote_experts.load_file")
    layers: Any = file.json_object().get("tokens")
    if not isinstance(layers, dict):
        raise file.refused("has no object 'tokens'")
    if not layers:
        raise file.refused("has no layer: the engine that wrote it has computed nothing")
    loads: dict[int, list[int]] = {}
    for name, counts in layers.items():
        valid = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
        if not (str(name).isdecimal() and valid):
            raise file.refused(f"has tokens of layer {name!r:.20} that are not a list of counts")
        loads[int(name)] = counts
    return loads
