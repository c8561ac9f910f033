"""State of one rank in megatron's sharded form: weights, optimizer state and random number generators.

A checkpoint in this form can be loaded in any layout. RNG states are restored only in the layout of the save, because they
belong to ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject

from slime_like.train.megatron.families.base import Family
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.platform.groups import RankInfo


@dataclass(frozen=True, slots=True)
class RankState:
    """The objects of one rank whose state a checkpoint holds."""

    model: ModelSegments
    optimizer: Any
    schedule: Any
    family: Family
    rank_info: RankInfo
    key: str = "model.hf_checkpoint"  # config key of the model
    verify: bool = True  # compare a checkpoint with its hashes before loading it


def sharded_weights(state: RankState) -> dict[str, Any]:
    """Return the sharded state of the model."""
    return {"model": state.model.sharded_state_dict(metadata=_metadata(state))}


def sharded_state(state: RankState, *, loading: bool) -> dict[str, Any]:
    """Return the sharded state of model and optimizer. Collective: the distributed optimizer gathers its shards for a save.

    With ``loading=False``, create the optimizer state if it is missing.
    """
    if not loading:
        _create_moments(state.optimizer)
    sharded = sharded_weights(state)
    sharded["optimizer"] = state.optimizer.sharded_state_dict(
        sharded["model"], is_loading=loading, metadata=_metadata(state)
    )
    return sharded


def content_metadata() -> dict[str, Any]:
    """Return megatron's options for the form of the sharded state, which are stored in the checkpoint."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _metadata(state: RankState) -> dict[str, Any]:
    return {**content_metadata(), "dp_cp_group": state.rank_info.dp_cp_group}


def _create_moments(optimizer: Any) -> None:
    """Create zero moments if no optimizer step was taken yet, because megatron requires them.

    No step is taken if filters drop every sample.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)


def layout_sizes(rank_info: RankInfo) -> dict[str, int]:
    """Return the parallel sizes that the checkpoint's manifest records."""
    sizes = rank_info.layout
    return {"tp": sizes.tp, "pp": sizes.pp, "cp": sizes.cp, "dp": sizes.dp, "ep": sizes.ep, "etp": sizes.etp}


# ---- random number generators ----------------------------------------------------------------------------------------
def rng_object(rank_info: RankInfo, state: Any) -> ShardedObject:
    """Return the sharded form of this rank's RNG ``state``; to load the state of a checkpoint, pass None."""
    sizes = rank_info.layout
    shape = (sizes.pp, sizes.tp, sizes.cp, sizes.dp)
    offset = (rank_info.pp_rank, rank_info.tp_rank, rank_info.cp_rank, rank_info.dp_rank)
    return ShardedObject("rng", state, shape, offset, replica_id=0)


def rng_state() -> list[dict[str, Any]]:
    """Return the states of torch's and megatron's generators."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "tracker": _tracker().get_states(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return [state]


def set_rng_state(states: list[dict[str, Any]]) -> None:
    """Restore the generators' states that ``rng_state`` returned."""
    (state,) = states
    torch.set_rng_state(state["torch"])
    _tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()
