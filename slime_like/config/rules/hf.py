"""Config and tokenizer files of a Hugging Face model folder, read as plain JSON without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from msgspec import Meta

from slime_like.config.rules.quantised import Float8, read_float8
from slime_like.config.schema.names import FAMILIES
from slime_like.errors import CheckpointError
from slime_like.util.reading import InputFile

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),  # only families that have FamilyEntry.yarn
}
"""Supported rope_type -> numbers that config.json must contain for it."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # each family uses at most one of these keys
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


REQUIRED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
GDN_REQUIRED = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Keys that a config.json must contain if it contains any of them."""
Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Few = Annotated[int, Meta(ge=1, le=2**16)]  # number of heads, layers or experts
Amount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]


class Sizes(TypedDict, total=False):
    """Types of the keys that a run reads in the text part of a config.json; other keys are allowed."""

    num_attention_heads: Few
    num_hidden_layers: Few
    hidden_size: Size
    vocab_size: Size
    max_position_embeddings: Size
    num_key_value_heads: Few | None
    head_dim: Size | None
    intermediate_size: Size | None
    rms_norm_eps: Positive
    rope_theta: Positive | None
    rope_scaling: dict[str, Any] | None
    rope_parameters: dict[str, Any] | None
    partial_rotary_factor: Positive | None
    attention_bias: bool
    hidden_act: str
    layer_types: list[str] | None
    use_sliding_window: bool | None
    sliding_window: int | None
    full_attention_interval: Few | None
    linear_num_key_heads: Few
    linear_num_value_heads: Few
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size
    num_experts: Amount | None
    num_local_experts: Amount | None
    n_routed_experts: Amount | None
    num_experts_per_tok: Amount | None
    moe_intermediate_size: Amount | None
    shared_expert_intermediate_size: Amount | None
    decoder_sparse_step: Amount | None
    mlp_only_layers: list[Amount] | None
    norm_topk_prob: bool | None
    n_shared_experts: Amount | None
    first_k_dense_replace: Amount | None
    moe_layer_freq: Few | None
    n_group: Few | None
    topk_group: Few | None
    routed_scaling_factor: Positive | None
    num_nextn_predict_layers: Amount | None
    num_mtp_modules: Amount | None
    rotary_dim: Size | None
    q_lora_rank: Size | None
    kv_lora_rank: Size | None
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size | None


class ModelFields(TypedDict, total=False):
    """Types of the top-level keys that a run reads in a config.json."""

    model_type: str | None
    architectures: list[str] | None
    text_config: dict[str, Any] | None
    tie_word_embeddings: bool | None
    dtype: str | None
    torch_dtype: str | None
    eos_token_id: Amount | list[Amount] | None


@dataclass(frozen=True, slots=True)
class GDNShape:
    """Shape of the Gated DeltaNet layers of a hybrid model."""

    key_heads: int
    value_heads: int
    key_dim: int  # per head
    value_dim: int  # per head
    conv_width: int


@dataclass(frozen=True, slots=True)
class HfConfig:
    """Values in a model's config.json that the rules and the plan read."""

    folder: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    num_experts: int  # 0: dense
    experts_per_token: int  # num_experts_per_tok of config.json; 0 if absent
    sparse_layers: tuple[int, ...]  # indices of the layers with experts
    tied: bool  # tie_word_embeddings of config.json; False if absent
    gdn: GDNShape | None = None  # None: attention in every layer
    latent: bool = False  # latent attention in every layer
    mtp_layers: int = 0  # layers for multi-token prediction, numbered after the decoder's layers
    rope_key: str = "rope_scaling"  # key of the rotary scaling in config.json
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])
    float8: Float8 | None = None  # None: no weight is quantised
    expert_width: int = 0  # intermediate size of a routed expert; has no meaning in dense models


def read_hf_config(key: str, folder: str) -> HfConfig:
    """Read ``config.json`` in ``folder``, which is set by ``key``.

    Raises ``CheckpointError`` naming ``key`` if the file is missing or does not describe a model, or if the model has a
    sliding window or an unsupported quantisation, or can be read only with its own code.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(f"{key}={folder!r} is not a folder: give the path of a downloaded Hugging Face model")
    values = read_json(key, path)
    float8 = read_float8(key, Path(folder), values)
    refuse_code(key, path, values)
    return replace(hf_config(key, folder, values), float8=float8)


def hf_config(key: str, folder: str, values: Mapping[str, Any]) -> HfConfig:
    """Parse ``values``, the content of the config.json of ``folder``. The folder need not exist.

    Quantisation is not parsed: ``float8`` is None. Raises ``CheckpointError`` naming ``key`` if the values do not describe a
    model, or describe a sliding window.
    """
    file = downloaded_file(key, Path(folder) / "config.json")
    top = file.typed(values, ModelFields)
    text = top.get("text_config") or values
    if missing := [name for name in REQUIRED if name not in text]:
        raise CheckpointError(
            f"{key}={folder!r}: config.json has no {missing[0]!r}; is it the config of a causal language model?"
        )
    missing_sizes = [name for name in GDN_REQUIRED if name not in text]
    if 0 < len(missing_sizes) < len(GDN_REQUIRED):
        raise CheckpointError(
            f"{key}={folder!r}: config.json has no {missing_sizes[0]!r}, which Gated DeltaNet layers need; add the value with which "
            "the model was made, or download or export the model again"
        )
    file.typed(text, Sizes)
    refuse_windows(key, folder, text, top.get("model_type") or "")
    rope_key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    return HfConfig(
        folder=folder,
        model_type=top.get("model_type") or "",
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        num_heads=text["num_attention_heads"],
        num_kv_heads=text.get("num_key_value_heads") or text["num_attention_heads"],
        vocab_size=text["vocab_size"],
        max_positions=text["max_position_embeddings"],
        num_experts=num_experts(text),
        experts_per_token=int(text.get("num_experts_per_tok") or 0),
        sparse_layers=sparse_layers(text),
        expert_width=text.get("moe_intermediate_size") or text.get("intermediate_size") or 0,
        tied=bool(top.get("tie_word_embeddings")),
        gdn=gdn_shape(text),
        latent=bool(text.get("kv_lora_rank")),
        mtp_layers=text.get("num_nextn_predict_layers") or text.get("num_mtp_modules") or 0,
        rope_key=rope_key,
        rope=cast("dict[str, Any]", text.get(rope_key) or {}),
    )


def refuse_code(key: str, path: Path, values: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` if a model folder can be read only with its own code, which is never run.

    ``values`` is the JSON content of the folder's file ``path``; its auto_map names such code. A model_type registered in
    ``FAMILIES`` does not need the code, because transformers prefers its own class.
    """
    code = values.get("auto_map")
    if code and str(values.get("model_type")) not in FAMILIES:  # the types of the values may not be checked yet
        raise CheckpointError(
            f"{key}: {path} has auto_map {code!r}: the model ships its own code, which is never run "
            "(trust_remote_code=False); use a folder in the format of a class in transformers, or remove auto_map if "
            "transformers has the model's class"
        )


def num_experts(text: Mapping[str, Any]) -> int:
    """Return the number of routed experts per sparse layer.

    It is 0 if config.json has no such number, or makes every layer dense.
    """
    return next((int(text[name]) for name in EXPERT_COUNTS if text.get(name)), 0) if _sparse_places(text) else 0


def sparse_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the layers that have routed experts."""
    return _sparse_places(text) if num_experts(text) else ()


def _sparse_places(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the layers where config.json allows experts. The number of experts, if any, is not read."""
    dense = cast("list[int]", text.get("mlp_only_layers") or ())
    first, every = int(text.get("first_k_dense_replace") or 0), int(text.get("moe_layer_freq") or 1)
    step = int(text.get("decoder_sparse_step") or 1)
    layers = range(first, int(text["num_hidden_layers"]))
    return tuple(n for n in layers if n not in dense and (n + 1) % step == 0 and n % every == 0)


def gdn_shape(text: Mapping[str, Any]) -> GDNShape | None:
    """Return the shape of Gated DeltaNet layers from the text part of a config.json; None if the model has no such layers.

    Raises ``KeyError`` if linear_num_value_heads is present and another key of ``GDN_REQUIRED`` is not.
    """
    if "linear_num_value_heads" not in text:
        return None
    return GDNShape(
        key_heads=int(text["linear_num_key_heads"]),
        value_heads=int(text["linear_num_value_heads"]),
        key_dim=int(text["linear_key_head_dim"]),
        value_dim=int(text["linear_value_head_dim"]),
        conv_width=int(text["linear_conv_kernel_dim"]),
    )


def refuse_windows(key: str, folder: str, text: Mapping[str, Any], model_type: str) -> None:
    """Raise ``CheckpointError`` if layers of a model attend to a sliding window, which trainer and engines would ignore.

    ``text`` is the text part of its config.json. ``use_sliding_window`` exists in configs of Qwen and models derived from it,
    and is false by default. Other configs, such as Mistral's, have a window if ``sliding_window`` is a number.
    """
    width = text.get("sliding_window")
    if "sliding_attention" in (text.get("layer_types") or ()):
        field, without = "layer_types", "full_attention in place of sliding_attention"
    elif text.get("use_sliding_window"):
        field, without = "use_sliding_window", "false"
    elif width and "use_sliding_window" not in text and not model_type.startswith("qwen"):
        field, without = "sliding_window", "null"
    else:
        return
    raise CheckpointError(
        f"{key}={folder!r}: config.json has {field}={text[field]!r}, but sliding windows are not supported: trainer and engines "
        f"would attend to all tokens; use another model, or write {without} if no sequence is longer than the window"
        + (f" of {width} tokens" if width else "")
    )


def rope_type(model: HfConfig) -> Any:
    """Return the kind of rotary scaling as config.json has it (a string, if it is valid); "default" if absent."""
    return model.rope.get("rope_type", model.rope.get("type", "default"))


def check_rope(key: str, model: HfConfig) -> None:
    """Raise ``CheckpointError`` if the scaling of rotary frequencies is unsupported or incomplete."""
    kind = rope_type(model)
    setting = f"{key}={model.folder!r}: config.json has {model.rope_key}.rope_type={kind!r}"
    family = FAMILIES.get(model.model_type)
    supported = [name for name in ROPE_TYPES if name != "yarn" or (family is not None and family.yarn)]
    if kind not in supported:
        raise CheckpointError(
            f"{setting}, which is not supported (supported: {', '.join(supported)}); "
            "remove the scaling to train within the model's original positions"
        )
    if missing := [name for name in ROPE_TYPES[kind] if not isinstance(model.rope.get(name), (int, float))]:
        raise CheckpointError(f"{setting} without a number for {', '.join(missing)}: copy it from the model's page")


def read_json(key: str, path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises ``CheckpointError`` naming ``key`` and the file if it is missing or not a JSON object.
    """
    if not path.exists():
        raise CheckpointError(
            f"{key}: {path} is missing; give a folder in Hugging Face format (config.json, tokenizer, safetensors)"
        )
    return downloaded_file(key, path).json_object()


def downloaded_file(key: str, path: Path) -> InputFile:
    """Return an ``InputFile`` for ``path``, a file in the Hugging Face folder set by ``key``."""
    return InputFile(path, CheckpointError, "download it again", key)


def check_tokenizer(key: str, folder: str, *, needs_template: str) -> None:
    """Raise ``CheckpointError`` if the tokenizer is missing, needs code from the folder or lacks a needed chat template.

    A tokenizer_config.json that is not a JSON object is an error too. ``needs_template`` names the setting that requires a
    chat template. If it is empty, no template is needed.
    """
    root = Path(folder)
    if not any((root / name).exists() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{key}={folder!r} has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); copy it from the model's page"
        )
    settings = root / "tokenizer_config.json"
    if settings.exists():
        refuse_code(key, settings, read_json(key, settings))
    if needs_template and not has_chat_template(key, folder):
        raise CheckpointError(
            f"{needs_template}, but the tokenizer of {key}={folder!r} has no chat template: "
            f"use an instruct model's tokenizer, add chat_template.jinja, or remove {needs_template.partition('=')[0]}"
        )


def has_chat_template(key: str, folder: str) -> bool:
    """Return whether the tokenizer of ``folder`` has a chat template.

    Raises ``CheckpointError`` naming ``key`` if tokenizer_config.json is not a JSON object.
    """
    root = Path(folder)
    if (root / "chat_template.jinja").exists() or (root / "chat_template.json").exists():
        return True
    settings = root / "tokenizer_config.json"
    return settings.exists() and bool(read_json(key, settings).get("chat_template"))
