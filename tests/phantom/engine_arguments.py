"""Arguments and hooks of an engine on a phantom GPU, in one process without an engine."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine.environment import child_environment
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like.rollout.engine.sglang_imports import sglang_imports
from tests.train.ranks import RankWorld

FIELDS = (
    "device",
    "dtype",
    "tp_size",
    "dcp_size",
    "attn_dp_size",
    "attention_backend",
    "sampling_backend",
    "enable_memory_saver",
)
PLUGINS = {"dcp": 2, "tp": 2, "admits_by_kv": True}  # fields with which most plugins are enabled


def resolve(world: RankWorld, model: Path, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plugins whose hooks SGLang has, and per variant of an engine the fields that SGLang resolves for this GPU."""
    del world
    spec = EngineSpec(str(model), "cuda", "bfloat16", 1, 512, 0, "engine.log", 60, 8)
    os.environ.update(child_environment(replace(spec, **PLUGINS), str(model.parent)))
    with sglang_imports():
        hooks: Any = importlib.import_module("slime_like_plugins.sglang_hooks")
        hooks.load_all()
        server_args: Any = importlib.import_module("sglang.srt.server_args")
    fields: dict[str, dict[str, Any]] = {}
    for name, changes in variants.items():
        arguments = server_args.ServerArgs(
            **server_arguments(EngineLaunch(replace(spec, **changes), "key", "127.0.0.1", 1234))
        )
        arguments.resolve_once()
        arguments.check_server_args()
        resolved = arguments.resolved_dict()
        fields[name] = {field: resolved[field] for field in FIELDS}
    return {"plugins": sorted(hooks._loaded), "fields": fields}
