"""Shape of a model, from the fields of its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime_like.config.schema.family_entry import FamilyEntry
from slime_like.config.schema.names import FAMILIES
from slime_like.errors import CheckpointError
from slime_like.planner.shapes import (
    ATTENTION,
    LATENT,
    RECURRENT,
    Attention,
    ExpertShape,
    LatentAttention,
    Layer,
    ModelShape,
    Recurrence,
)
from slime_like.util.reading import InputFile

MAX_LAYERS = 2**16


def read_shape(flag: str, folder: str, family: str = "auto") -> ModelShape:
    """Read the shape from ``config.json`` in ``folder``; ``family`` as for ``shape_of``.

    Raises ``CheckpointError`` naming ``flag`` if the file is missing or unusable.
    """
    if not (Path(folder) / "config.json").exists():
        raise CheckpointError(f"{flag}: {folder} has no config.json: give the folder of a model in Hugging Face format")
    file = InputFile(Path(folder) / "config.json", CheckpointError, "download it again", flag)
    return shape_of(file.json_object(), folder, file, family)


def shape_of(values: Mapping[str, Any], name: str, file: InputFile | None = None, family: str = "auto") -> ModelShape:
    """Return the shape that the fields of a config.json describe.

    ``family``, a value of ``model.family``, replaces model_type unless it is auto or the import path of a user's family.
    Raises ``CheckpointError`` if a field is missing or unusable; the error names ``file`` or, without a file, ``name``.
    """
    file = file or InputFile(Path(name), CheckpointError, "give the config.json of a causal language model")
    text = values.get("text_config") or values
    if not isinstance(text, Mapping):
        raise file.refused(f"has text_config={text!r}, which is not a JSON object")
    fields = _Fields(cast("Mapping[str, Any]", text), file)
    num_layers = fields.count("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise file.refused(f"has num_hidden_layers={num_layers}, above {MAX_LAYERS}")
    sparse = _sparse_layers(fields, num_layers)
    mixers = _mixers(fields, num_layers)
    layers = tuple(Layer(mixer, index in sparse) for index, mixer in enumerate(mixers))
    return ModelShape(
        name=name,
        hidden=fields.count("hidden_size"),
        vocabulary=fields.count("vocab_size"),
        tied=bool(values.get("tie_word_embeddings", fields.values.get("tie_word_embeddings", False))),
        layers=layers,
        max_positions=fields.count("max_position_embeddings"),
        attention=_attention(fields, family) if ATTENTION in mixers else None,
        latent=_latent(fields) if LATENT in mixers else None,
        recurrence=_recurrence(fields) if RECURRENT in mixers else None,
        dense_width=_dense_width(fields) if len(sparse) < num_layers else 0,
        experts=_experts(fields) if sparse else None,
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Fields of a config.json, whose numbers are checked when they are read."""

    values: Mapping[str, Any]
    file: InputFile

    def count(self, *names: str) -> int:
        """Return the value of the first of ``names`` that is set.

        Raises ``CheckpointError`` if none is set, or the value is not an integer from 1 to 2**31 - 1.
        """
        number = self.optional(*names)
        if number == 0:
            name = next((name for name in names if self.values.get(name) is not None), None)
            problem = f"has no {names[0]!r}, which a causal language model needs"
            raise self.file.refused(problem if name is None else f"has {name}=0, which is not a positive number")
        return number

    def optional(self, *names: str) -> int:
        """Return the value of the first of ``names`` that is set; 0 if none is set.

        Raises ``CheckpointError`` if that value is not an integer from 0 to 2**31 - 1.
        """
        name = next((name for name in names if self.values.get(name) is not None), None)
        if name is None:
            return 0
        number = self.values[name]
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise self.file.refused(f"has {name}={number!r}, which is not a number of 0 or more")
        return number


def _mixers(fields: _Fields, num_layers: int) -> tuple[str, ...]:
    if fields.optional("kv_lora_rank"):
        return (LATENT,) * num_layers
    if not fields.optional("linear_num_value_heads"):
        return (ATTENTION,) * num_layers
    kinds = fields.values.get("layer_types")
    if kinds is None:
        interval = fields.optional("full_attention_interval") or 4
        return tuple(ATTENTION if (i + 1) % interval == 0 else RECURRENT for i in range(num_layers))
    if not isinstance(kinds, list) or len(cast("list[Any]", kinds)) != num_layers:
        raise fields.file.refused(f"has layer_types that are not a list of num_hidden_layers={num_layers} names")
    return tuple(RECURRENT if kind == "linear_attention" else ATTENTION for kind in cast("list[Any]", kinds))


def _sparse_layers(fields: _Fields, num_layers: int) -> frozenset[int]:
    if not fields.optional("num_experts", "num_local_experts", "n_routed_experts"):
        return frozenset()
    first = fields.optional("first_k_dense_replace")
    step = fields.optional("decoder_sparse_step", "moe_layer_freq") or 1
    dense_layers = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise fields.file.refused(f"has mlp_only_layers={dense_layers!r}, which is not a list of layers")
    dense = cast("list[Any]", dense_layers)
    offset = 1 if fields.optional("decoder_sparse_step") else 0  # Qwen counts layers from 1, DeepSeek from 0
    return frozenset(i for i in range(first, num_layers) if (i + offset) % step == 0 and i not in dense)


def _dense_width(fields: _Fields) -> int:
    return 0 if fields.values.get("intermediate_size") is None else fields.count("intermediate_size")


def _attention(fields: _Fields, family: str) -> Attention:
    heads = fields.count("num_attention_heads")
    kv_heads = heads if fields.values.get("num_key_value_heads") is None else fields.count("num_key_value_heads")
    if heads % kv_heads:
        raise fields.file.refused(f"has num_key_value_heads={kv_heads}, which does not divide its {heads} heads")
    entry = FAMILIES.get(family) or FAMILIES.get(str(fields.values.get("model_type"))) or FamilyEntry("")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(fields, heads),
        gated=entry.output_gate,
        normed=entry.head_norms,
        bias=entry.qkv_bias or bool(fields.values.get("attention_bias")),
    )


def _head_dim(fields: _Fields, heads: int) -> int:
    """Return ``head_dim``, by default ``hidden_size / num_attention_heads``.

    Raises ``CheckpointError`` if head_dim is unusable, or if it is not set and hidden_size is missing, unusable or below
    num_attention_heads.
    """
    if fields.values.get("head_dim") is not None:
        return fields.count("head_dim")
    hidden = fields.count("hidden_size")
    if hidden < heads:
        raise fields.file.refused(f"has hidden_size={hidden} below num_attention_heads={heads}, and no head_dim")
    return hidden // heads


def _latent(fields: _Fields) -> LatentAttention:
    return LatentAttention(
        heads=fields.count("num_attention_heads"),
        query_rank=fields.optional("q_lora_rank"),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )


def _recurrence(fields: _Fields) -> Recurrence:
    return Recurrence(
        key_heads=fields.count("linear_num_key_heads"),
        value_heads=fields.count("linear_num_value_heads"),
        key_dim=fields.count("linear_key_head_dim"),
        value_dim=fields.count("linear_value_head_dim"),
        conv_width=fields.count("linear_conv_kernel_dim"),
    )


def _experts(fields: _Fields) -> ExpertShape:
    mixtral = fields.optional("num_local_experts") > 0  # such configs have the width of an expert in intermediate_size
    width = fields.count("moe_intermediate_size", *(("intermediate_size",) if mixtral else ()))
    shared_width = fields.optional("shared_expert_intermediate_size")
    num_experts, per_token = (
        fields.count("num_experts", "num_local_experts", "n_routed_experts"),
        fields.count("num_experts_per_tok"),
    )
    if per_token > num_experts:
        raise fields.file.refused(f"has num_experts_per_tok={per_token}, above its {num_experts} experts")
    return ExpertShape(
        num_experts=num_experts,
        per_token=per_token,
        width=width,
        shared_width=shared_width or fields.optional("n_shared_experts") * width,
        shared_gate=shared_width > 0,
    )
