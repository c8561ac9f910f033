"""Fingerprint of a model in the manifest of its checkpoints, and the check against it."""

from __future__ import annotations

from pathlib import Path

from slime_like.checkpoint.record import Manifest, Scalar
from slime_like.config.rules.saved_model import check_padding
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.base import Family


def fingerprint(family: Family, head: str) -> dict[str, Scalar]:
    """Return the properties that two models must share to load each other's checkpoints.

    ``head`` is ``PolicyModel.head`` or ``ValueModel.head``.
    """
    hf = family.hf
    keys = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    shape = ("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings")
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    return {
        **{key: getattr(hf, key, None) for key in (*keys, *shape, *(experts if family.num_experts else ()))},
        **{key: getattr(hf, key) for key in family.shape_keys},
        **({"layer_pattern": "".join(family.blocks())} if family.shape_keys else {}),
        "head": head,
        "padded_vocabulary": family.padded_vocabulary,  # depends on parallel.tp if that does not divide 128
    }


def check_model(manifest: Manifest, family: Family, head: str, source: Path, key: str = "model.hf_checkpoint") -> None:
    """Raise ``CheckpointError`` unless the fingerprint in ``manifest`` is that of a model of ``family`` with ``head``.

    For the message, ``source`` is the checkpoint that has this manifest, and ``key`` is the config key that names the model.
    """
    check_padding(manifest, source, family.padded_vocabulary, family.tp)
    expected, saved_model = fingerprint(family, head), manifest.model
    for name in expected:
        if expected[name] != saved_model.get(name):
            raise CheckpointError(
                f"{source} was saved from another model: its {name} is {saved_model.get(name)}, but {expected[name]} in {key}; "
                "use the model that the checkpoint was trained from"
            )
