"""Megatron distributed checkpoints (torch_dist): model, optimizer, schedule, RNG and version, loadable in any layout."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_common_state_dict,
)
from torch.distributed.checkpoint import CheckpointException

from slime_like.errors import CheckpointError
from slime_like.train.megatron.collective import make_empty, move_into_place, on_rank_zero
from slime_like.train.megatron.families.base import Family
from slime_like.train.megatron.groups import Place
from slime_like.train.megatron.model import Policy

LATEST = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint is made of on one rank."""

    model: Policy
    optimizer: Any
    schedule: Any
    family: Family
    place: Place


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Where megatron keeps an iteration."""
    return folder / f"iter_{iteration:07d}"


def save(parts: Parts, folder: Path, iteration: int, version: int) -> None:
    """Write ``folder/iter_<iteration>`` and then, when every rank is done, name it the latest.

    A save that is cut off leaves the earlier checkpoint the latest one. Collective.
    """
    target = iteration_folder(folder, iteration)
    scratch = target.with_name(target.name + ".tmp")
    on_rank_zero(lambda: make_empty(scratch))
    state = _sharded_state(parts, loading=False)
    state["rng"] = _rng_object(parts.place, _rng_state())
    state["trainer"] = {
        "iteration": iteration,
        "version": version,
        "schedule_steps": int(parts.schedule.num_steps),
        "optim": {
            "max_lr": parts.optimizer.param_groups[0]["max_lr"],
            "min_lr": parts.optimizer.param_groups[0]["min_lr"],
        },
        "layout": _layout(parts.place),
        "distributed_optimizer": parts.place.layout.distributed_optimizer,
        "model": _fingerprint(parts.family),
    }
    try:
        dist_checkpointing.save(
            state, str(scratch), get_default_save_sharded_strategy("torch_dist"), content_metadata=_content()
        )
    except CheckpointException as error:  # a BaseException: `except Exception` would let a failed save pass
        raise CheckpointError(f"{target}: the save failed on a rank ({_reason(error)}); is the disk full?") from error
    dist.barrier()

    def publish() -> None:
        move_into_place(scratch, target)
        _write_atomically(folder / LATEST, str(iteration))

    on_rank_zero(publish)


def load(parts: Parts, folder: Path) -> tuple[int, int]:
    """Restore the latest checkpoint of ``folder``; returns (iteration, version). Collective.

    Raises ``CheckpointError`` when it is missing, torn, or of another model.
    """
    iteration = latest_iteration(folder)
    source = iteration_folder(folder, iteration)
    if not (source / "metadata.json").is_file():
        raise CheckpointError(
            f"{source}: missing or incomplete (no metadata.json) though {folder / LATEST} names it; "
            f"write an earlier iteration into {LATEST}, or start without it"
        )
    try:
        trainer = load_common_state_dict(str(source))["trainer"]
        _check(trainer, parts, source)
        _restore(parts, source, trainer)
    except CheckpointError:
        raise
    except (CheckpointException, CheckpointingException, pickle.UnpicklingError, *_TORN) as error:
        raise CheckpointError(
            f"{source}: torn, or not a checkpoint of this trainer ({_reason(error)}); use an earlier iteration"
        ) from error
    return int(trainer["iteration"]), int(trainer["version"])


# What torch's and megatron's readers raise on files that are cut short, missing or of another making.
_TORN = (OSError, EOFError, KeyError, ValueError, RuntimeError, TypeError, AttributeError, IndexError)


def latest_iteration(folder: Path) -> int:
    """The iteration that ``folder``'s latest file names."""
    path = folder / LATEST
    try:
        return int(path.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; {folder} holds no finished checkpoint") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: must hold one iteration number ({error})") from error


def _restore(parts: Parts, source: Path, trainer: dict[str, Any]) -> None:
    groups = parts.optimizer.param_groups
    own = [(group["max_lr"], group["min_lr"]) for group in groups]
    for group in groups:  # megatron finds a saved group by these values too: a resumed run may change them
        group.update(trainer["optim"])
    state = _sharded_state(parts, loading=True)
    same_layout = trainer["layout"] == _layout(parts.place)
    if same_layout:  # RNG states belong to ranks
        state["rng"] = _rng_object(parts.place, None)
    loaded: Any = dist_checkpointing.load(state, str(source), get_default_load_sharded_strategy(str(source)))
    parts.model.load_state_dict(loaded["model"])
    with torch.no_grad():
        parts.optimizer.load_state_dict(loaded["optimizer"])
    for group, (max_lr, min_lr) in zip(parts.optimizer.param_groups, own, strict=True):
        group["max_lr"], group["min_lr"] = max_lr, min_lr
    parts.schedule.num_steps = int(trainer["schedule_steps"])
    parts.schedule.step(0)
    if same_layout:
        _set_rng_state(loaded["rng"][0])


def _sharded_state(parts: Parts, *, loading: bool) -> dict[str, Any]:
    metadata = {**_content(), "dp_cp_group": parts.place.dp_cp_group}
    state: dict[str, Any] = {"model": parts.model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = parts.optimizer.sharded_state_dict(state["model"], is_loading=loading, metadata=metadata)
    return state


def _content() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _check(trainer: dict[str, Any], parts: Parts, source: Path) -> None:
    wanted, found = _fingerprint(parts.family), trainer["model"]
    for key in wanted:
        if wanted[key] != found.get(key):
            raise CheckpointError(
                f"{source}: of another model: {key} is {found.get(key)} there and {wanted[key]} in "
                "model.hf_checkpoint; give the checkpoint the model it was trained from"
            )
    mine = parts.place.layout.distributed_optimizer
    if trainer["distributed_optimizer"] != mine:
        raise CheckpointError(
            f"{source}: saved with parallel.distributed_optimizer={trainer['distributed_optimizer']}, "
            f"which cannot be loaded with {mine}: set it as it was"
        )


def _fingerprint(family: Family) -> dict[str, Any]:
    hf = family.hf
    keys = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    return {key: getattr(hf, key, None) for key in (*keys, *more)}


def _layout(place: Place) -> dict[str, int]:
    sizes = place.layout
    return {"tp": sizes.tp, "pp": sizes.pp, "cp": sizes.cp, "dp": sizes.dp, "ep": sizes.ep}


def _rng_object(place: Place, state: Any) -> ShardedObject:
    sizes = place.layout
    shape = (sizes.pp, sizes.tp, sizes.cp, sizes.dp)
    offset = (place.pp_rank, place.tp_rank, place.cp_rank, place.dp_rank)
    return ShardedObject("rng", state, shape, offset, replica_id=0)


def _rng_state() -> list[dict[str, Any]]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "tracker": _tracker().get_states(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return [state]


def _tracker() -> Any:
    return tensor_parallel.get_cuda_rng_tracker()


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    _tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
