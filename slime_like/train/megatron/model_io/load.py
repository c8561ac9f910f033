"""Loading of a checkpoint that ``save`` wrote.

Weights, optimizer state, schedule and weight version are restored in any layout, RNG states only in the layout of the save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy

from slime_like.checkpoint.files import iteration_folder
from slime_like.checkpoint.record import Manifest, check_value_head
from slime_like.errors import CheckpointError
from slime_like.train.megatron.model_io.damage import convert_damage, read_verified_manifest
from slime_like.train.megatron.model_io.fingerprint import check_model
from slime_like.train.megatron.model_io.node_files import on_every_node
from slime_like.train.megatron.model_io.rank_state import (
    RankState,
    layout_sizes,
    rng_object,
    set_rng_state,
    sharded_state,
    sharded_weights,
)


def load_checkpoint(state: RankState, folder: Path, iteration: int) -> int:
    """Restore ``folder/iter_<iteration>``, written in any layout. Return its weight version. Collective.

    Raises ``CheckpointError`` if it is missing or damaged, cannot be copied to a node that does not share ``folder``, belongs to
    another model, or was saved with another ``parallel.distributed_optimizer`` or padding of the vocabulary.
    """
    with on_every_node(iteration_folder(folder, iteration), state.rank_info) as source:
        manifest = read_verified_manifest(source, verify=state.verify)
        _check_model(manifest, state, source)
        _check_optimizer(manifest, state, source)
        with convert_damage(
            lambda reason: (
                f"{source}: damaged, or not a checkpoint of this trainer ({reason}); use an earlier iteration"
            )
        ):
            _restore(state, source, manifest)
    return manifest.version


def load_weights(state: RankState, source: Path) -> None:
    """Load only the weights of an iteration's folder, which must be readable on every node. Collective.

    Raises ``CheckpointError`` as ``load_checkpoint`` does, but accepts another ``parallel.distributed_optimizer``.
    """
    _check_model(read_verified_manifest(source, verify=state.verify), state, source)
    with convert_damage(lambda reason: f"{source}: damaged ({reason}); use another iteration"):
        loaded_state = _read(sharded_weights(state), source)
    state.model.load_state_dict(loaded_state["model"])
    state.optimizer.reload_model_params()  # the optimizer has copies of the weights


def _restore(state: RankState, source: Path, manifest: Manifest) -> None:
    groups = state.optimizer.param_groups
    configured_lrs = [(group["max_lr"], group["min_lr"]) for group in groups]
    for group in groups:  # megatron also matches saved groups by these rates, which the config may have changed
        group.update(max_lr=manifest.max_lr, min_lr=manifest.min_lr)
    sharded = sharded_state(state, loading=True)
    same_layout = manifest.layout == layout_sizes(state.rank_info)
    if same_layout:  # RNG states belong to ranks
        sharded["rng"] = rng_object(state.rank_info, None)
    loaded_state = _read(sharded, source)
    state.model.load_state_dict(loaded_state["model"])
    with torch.no_grad():
        state.optimizer.load_state_dict(loaded_state["optimizer"])
    for group, (max_lr, min_lr) in zip(state.optimizer.param_groups, configured_lrs, strict=True):
        group["max_lr"], group["min_lr"] = max_lr, min_lr
    state.schedule.num_steps = manifest.schedule_steps
    state.schedule.step(0)
    if same_layout:
        set_rng_state(loaded_state["rng"])


def _read(sharded: dict[str, Any], source: Path) -> Any:
    return dist_checkpointing.load(sharded, str(source), get_default_load_sharded_strategy(str(source)))


def _check_model(manifest: Manifest, state: RankState, source: Path) -> None:
    head = state.model.last.head
    if head == "value":
        check_value_head(source, manifest)
    check_model(manifest, state.family, head, source, state.key)


def _check_optimizer(manifest: Manifest, state: RankState, source: Path) -> None:
    configured = state.rank_info.layout.distributed_optimizer
    if manifest.distributed_optimizer != configured:
        raise CheckpointError(
            f"{source} was saved with parallel.distributed_optimizer={manifest.distributed_optimizer} and cannot be loaded "
            f"with {configured}: set parallel.distributed_optimizer={manifest.distributed_optimizer}"
        )
