"""Shape of a model, from the fields of its config.json: parameters per layer, and the state that a token leaves in a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError
from slime_like.util.reading import InputFile

ATTENTION, LATENT, RECURRENT = "attention", "latent", "recurrent"
MAX_LAYERS = 2**16
NORM_WEIGHTS = 2  # of a layer: before the token mixer and before the MLP


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False  # an output gate per query channel
    normed: bool = False  # queries and keys have a norm
    bias: bool = False

    @property
    def query(self) -> int:
        """Channels of all queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Channels of all keys; the values have as many."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434)."""

    heads: int
    query_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Gated DeltaNet."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Channels that pass the causal convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Routed experts of a layer, and the shared expert's width (0: none)."""

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer: str  # ATTENTION | LATENT | RECURRENT
    sparse: bool  # experts instead of a dense MLP


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a causal language model."""

    name: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    max_positions: int
    attention: Attention | None = None
    latent: LatentAttention | None = None
    recurrence: Recurrence | None = None
    dense_width: int = 0
    experts: ExpertShape | None = None
    mtp_layers: int = 0  # multi-token prediction; engines and trainer do not load them

    def count(self, mixer: str) -> int:
        """Return the number of layers with ``mixer``."""
        return sum(layer.mixer == mixer for layer in self.layers)

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(layer.sparse for layer in self.layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layers with a KV cache; 1 for latent attention."""
        return 1 if self.attention is None else self.attention.kv_heads

    @property
    def heads(self) -> int:
        """Query heads of the layers with a KV cache."""
        return self.attention.heads if self.attention is not None else self.latent.heads if self.latent else 1

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        return 0 if self.experts is None else 3 * self.hidden * self.experts.width

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return 0 if self.experts is None else self.sparse_layers * self.experts.count * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; a separate output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters without the multi-token prediction layers."""
        mixers = sum(self.count(mixer) * self.mixer_parameters(mixer) for mixer in (ATTENTION, LATENT, RECURRENT))
        dense = (len(self.layers) - self.sparse_layers) * self.dense_parameters
        sparse = self.sparse_layers * (self.shared_parameters + self.router_parameters) + self.routed_parameters
        norms = (NORM_WEIGHTS * len(self.layers) + 1) * self.hidden
        return mixers + dense + sparse + norms + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, without the embedding's table."""
        idle = 0
        if self.experts is not None:
            idle = self.sparse_layers * (self.experts.count - self.experts.per_token) * self.expert_parameters
        return self.parameters - idle - (0 if self.tied else self.embedding_parameters)

    @property
    def dense_parameters(self) -> int:
        """Parameters of one dense MLP."""
        return 3 * self.hidden * self.dense_width

    @property
    def shared_parameters(self) -> int:
        """Parameters of one layer's shared expert and its gate."""
        if self.experts is None:
            return 0
        return 3 * self.hidden * self.experts.shared_width + self.hidden * self.experts.shared_gate

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return 0 if self.experts is None else self.hidden * self.experts.count

    def mixer_parameters(self, mixer: str) -> int:
        """Return the parameters of one layer's token mixer."""
        if mixer == ATTENTION and (a := self.attention):
            queries = a.query * (2 if a.gated else 1)
            biases = queries + 2 * a.key if a.bias else 0
            return self.hidden * (queries + 2 * a.key) + a.query * self.hidden + biases + 2 * a.head_dim * a.normed
        if mixer == LATENT and (m := self.latent):
            return sum(latent_parts(self.hidden, m).values())
        if mixer == RECURRENT and (r := self.recurrence):
            inputs = self.hidden * (r.channels + r.values + 2 * r.value_heads)
            return inputs + r.channels * r.conv_width + 2 * r.value_heads + r.value_dim + r.values * self.hidden
        return 0


def latent_parts(hidden: int, latent: LatentAttention) -> dict[str, int]:
    """Return the parameters of one latent attention layer by projection."""
    heads, query_width = latent.heads, latent.heads * (latent.nope_dim + latent.rope_dim)
    down = hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank
    if latent.query_rank:
        down += hidden * latent.query_rank + latent.query_rank
    return {
        "down": down,
        "query_up": (latent.query_rank or hidden) * query_width,
        "kv_up": latent.kv_rank * heads * (latent.nope_dim + latent.value_dim),
        "output": heads * latent.value_dim * hidden,
    }


def read_shape(flag: str, folder: str) -> ModelShape:
    """Read the shape from ``config.json`` in ``folder``. Raises ``CheckpointError`` naming ``flag``."""
    file = InputFile(Path(folder) / "config.json", CheckpointError, "download it again", flag)
    return shape_of(file.json_object(), folder, file)


def shape_of(values: Mapping[str, Any], name: str, file: InputFile | None = None) -> ModelShape:
    """Return the shape that the fields of a config.json describe.

    Raises ``CheckpointError`` on a missing or unusable field, with the ``file`` if there is one.
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
        attention=_attention(fields) if ATTENTION in mixers else None,
        latent=_latent(fields) if LATENT in mixers else None,
        recurrence=_recurrence(fields) if RECURRENT in mixers else None,
        dense_width=fields.optional("intermediate_size") if len(sparse) < num_layers else 0,
        experts=_experts(fields) if sparse else None,
        mtp_layers=fields.optional("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Numbers of a config.json."""

    values: Mapping[str, Any]
    file: InputFile

    def count(self, *names: str) -> int:
        """Return the first of ``names`` that is set; raise unless it is a positive integer."""
        number = self.optional(*names)
        if number == 0:
            raise self.file.refused(f"has no {names[0]!r}, which a causal language model needs")
        return number

    def optional(self, *names: str) -> int:
        """Return the first of ``names`` that is set, 0 if none is; raise unless it is an integer of 0 or more."""
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
    listed = fields.values.get("mlp_only_layers") or []
    if not isinstance(listed, list):
        raise fields.file.refused(f"has mlp_only_layers={listed!r}, which is not a list of layers")
    dense = cast("list[Any]", listed)
    offset = 1 if fields.optional("decoder_sparse_step") else 0  # Qwen counts layers from 1, DeepSeek from 0
    return frozenset(i for i in range(first, num_layers) if (i + offset) % step == 0 and i not in dense)


def _attention(fields: _Fields) -> Attention:
    heads = fields.count("num_attention_heads")
    kind = str(fields.values.get("model_type") or "")
    return Attention(
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads") or heads,
        head_dim=fields.optional("head_dim") or fields.count("hidden_size") // heads,
        gated=fields.optional("linear_num_value_heads") > 0,  # Qwen3-Next and Qwen3.5
        normed=kind.startswith("qwen3"),
        bias=kind == "qwen2" or bool(fields.values.get("attention_bias")),
    )


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
    width = fields.count("moe_intermediate_size")
    shared = fields.optional("shared_expert_intermediate_size")
    count, per_token = (
        fields.count("num_experts", "num_local_experts", "n_routed_experts"),
        fields.count("num_experts_per_tok"),
    )
    if per_token > count:
        raise fields.file.refused(f"has num_experts_per_tok={per_token}, above its {count} experts")
    return ExpertShape(
        count=count,
        per_token=per_token,
        width=width,
        shared_width=shared or fields.optional("n_shared_experts") * width,
        shared_gate=shared > 0,
    )
