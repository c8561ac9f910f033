"""Initial weights from an HF folder, or from a Megatron ``torch_dist`` folder of this trainer or of megatron's GPTModel.

GPTModel's folders differ from this trainer's: a decoder block has one layer number, not two as in HybridModel; if all blocks
are alike, each parameter is stored for all blocks in one tensor [num_blocks, ...]; the final norm has another name; and
TransformerEngine's fused linears hold the norm before them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

from slime_like.checkpoint.files import MANIFEST, megatron_folder
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.base import Family, Weight
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.model.model import ModelSegments, load_hf
from slime_like.train.megatron.model_io.damage import convert_damage, read_verified_manifest
from slime_like.train.megatron.platform.groups import RankInfo

# Our key of a norm -> its key in TransformerEngine's layers, where the linear after the norm holds it.
FUSED_NORMS = {
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.weight": "decoder.layers.mlp.linear_fc1.layer_norm_weight",
}
GPT_SYMBOLS = frozenset("*-E")  # layers whose weights have a known name in GPTModel
MODEL = ("decoder.", "embedding.", "output_layer.")


def load_initial_weights(
    model: ModelSegments,
    key: str,
    folder: str,
    table: dict[str, Weight],
    family: Family,
    rank_info: RankInfo,
    *,
    verify: bool = True,
) -> None:
    """Load this rank's parameters from ``folder``, in HF or Megatron format. Collective.

    ``key`` is the config key of the folder, for messages. Raises ``CheckpointError`` if the folder is missing, damaged or not
    supported, or belongs to another model.
    """
    source = megatron_folder(Path(folder))
    if source is None:
        load_hf(model, table, HFFolder(folder, key), rank_info)
    else:
        load_megatron(model, source, key, family, verify=verify)


def load_megatron(model: ModelSegments, source: Path, key: str, family: Family, *, verify: bool = True) -> None:
    """Load this rank's parameters from the iteration folder ``source``, whose optimizer state is not read. Collective.

    The files of a checkpoint of this trainer are first compared with the recorded sizes and, if ``verify``, hashes. Raises
    ``CheckpointError`` if the folder is damaged or belongs to another model.
    """
    if (source / MANIFEST).is_file():
        read_verified_manifest(source, verify=verify)
    policies = model.policies
    states: list[dict[str, Any]] = [p.sharded_state_dict(metadata={"singleton_local_shards": False}) for p in policies]
    with convert_damage(lambda reason: f"{key}: {source} is damaged, or not a torch_dist checkpoint ({reason})"):
        metadata = dist_checkpointing.load_tensors_metadata(str(source))
        if not (source / MANIFEST).is_file() and GPT_SYMBOLS.issuperset("".join(family.blocks())):
            for state in states:
                _use_gpt_keys(state, metadata, family)
        requested_tensors = {f"segment{i}": _tensors_of(state) for i, state in enumerate(states)}
        entries = [entry for state in requested_tensors.values() for entry in state.values()]
        _check_stored(entries, metadata, source, key)
        _check_unread(entries, metadata, source, key)
        loaded_tensors: Any = dist_checkpointing.load(requested_tensors, str(source))
    for policy, name in zip(policies, requested_tensors, strict=True):
        # Not strict: megatron's states include layers without tensors, which are not in the folder.
        policy.load_state_dict(loaded_tensors[name], strict=False)


def _use_gpt_keys(state: dict[str, Any], stored: dict[str, Any], family: Family) -> None:
    """Give the entries of one segment's ``state`` the keys that they have in a folder of GPTModel."""
    retarget_sharded_state_dict_to_gpt_checkpoint(state, gpt_compatible_layer_maps("".join(family.blocks())))
    for entry in state.values():
        if isinstance(entry, ShardedBase) and entry.key not in stored:
            entry.key = FUSED_NORMS.get(entry.key, entry.key)


def _tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in state.items() if isinstance(entry, (ShardedTensor, ShardedTensorFactory))}


def _check_stored(entries: list[Any], stored: dict[str, Any], source: Path, key: str) -> None:
    for entry in entries:
        if entry.key not in stored:
            raise CheckpointError(
                f"{key}: {source} has no tensor {entry.key!r}, but {len(stored)} others such as {sorted(stored)[0]!r}: it belongs to "
                "another model or was saved with other layer classes; use a folder of the model in model.hf_checkpoint"
            )
        parts = [entry] if isinstance(entry, ShardedTensor) else _tensors(entry.build())
        for part in parts:
            expected, actual = tuple(part.global_shape), tuple(stored[part.key].global_shape)
            if part.allow_shape_mismatch:  # the vocabulary, whose padding may differ
                expected, actual = expected[1:], actual[1:]
            if expected != actual:
                raise CheckpointError(
                    f"{key}: {source}: {part.key} has shape {actual}, but config.json of model.hf_checkpoint implies "
                    f"{expected}: use the model that the checkpoint was made from"
                )


def _check_unread(entries: list[Any], stored: dict[str, Any], source: Path, key: str) -> None:
    """Raise ``CheckpointError`` if the folder has weights under ``MODEL`` that no rank loads: it belongs to another model.

    Collective: each pipeline stage loads only its own layers.
    """
    stages: list[set[str]] = [set() for _ in range(dist.get_world_size())]  # a pipeline stage loads only its layers
    dist.all_gather_object(stages, {entry.key for entry in entries})
    requested_keys: set[str] = set().union(*stages)
    unread_keys = sorted(
        k for k in stored if k not in requested_keys and k.startswith(MODEL) and k.endswith(("weight", "bias"))
    )
    if unread_keys:
        raise CheckpointError(
            f"{key}: {source} contains {unread_keys[0]!r}, which the model of model.hf_checkpoint does not have "
            f"({len(unread_keys)} such tensors): use the model that the checkpoint was made from"
        )


def _tensors(node: Any) -> list[ShardedTensor]:
    if isinstance(node, ShardedTensor):
        return [node]
    values = node.values() if isinstance(node, dict) else node
    return [tensor for value in values for tensor in _tensors(value)]
