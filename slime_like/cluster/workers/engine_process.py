"""Prepare the process of a Ray actor that owns an engine's server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slime_like.cluster.supervise.stacks import dump_stacks_on_signal
from slime_like.config.rules.trained_sampling import changing_variables
from slime_like.config.schema.resolved import EngineSpec
from slime_like.util.caches import keep_caches_private

VISIBLE_DEVICES = "SLIME_LIKE_ENGINE_GPUS"  # set by the placement for an engine's actor


def prepare_process(name: str, spec: EngineSpec, stacks_dir: str, env: Mapping[str, str]) -> None:
    """Set the environment that the server inherits, and make this process write its stacks on a signal.

    Variables that would change the sampling of training data are removed. Raises the errors of ``keep_caches_private``.
    """
    os.environ.update(env)
    if spec.feeds_training:
        for variable in changing_variables(os.environ):  # set on this node; the driver has already rejected its own
            del os.environ[variable]
    keep_caches_private()
    dump_stacks_on_signal(Path(stacks_dir), name.replace(" ", "_"))
    if VISIBLE_DEVICES in os.environ:  # Ray leaves all GPUs visible to an actor that requests none
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[VISIBLE_DEVICES]
