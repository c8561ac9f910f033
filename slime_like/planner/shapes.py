"""Shape of a model: sizes of its layers, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, LATENT, RECURRENT = "attention", "latent", "recurrent"
MIXERS = (ATTENTION, LATENT, RECURRENT)
NORM_WEIGHTS = 2  # norms of a layer: before the token mixer and before the MLP


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of grouped-query attention."""

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
    """Sizes of multi-head latent attention (https://arxiv.org/abs/2405.04434)."""

    heads: int
    query_rank: int  # 0: queries are projected directly
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Sizes of a Gated DeltaNet layer, which is recurrent."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Channels of the causal convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of a layer's routed experts, and the width of its shared expert (0: none)."""

    num_experts: int
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

    def count(self, mixer: str) -> int:
        """Return the number of layers with ``mixer``."""
        return sum(layer.mixer == mixer for layer in self.layers)

    @property
    def sparse_layers(self) -> int:
        """Number of layers with experts."""
        return sum(layer.sparse for layer in self.layers)

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layers with a KV cache; 1 for latent attention or without such layers."""
        return 1 if self.attention is None else self.attention.kv_heads

    @property
    def heads(self) -> int:
        """Query heads of the layers with a KV cache; 1 without such layers."""
        return self.attention.heads if self.attention is not None else self.latent.heads if self.latent else 1

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert of one layer."""
        return 0 if self.experts is None else 3 * self.hidden * self.experts.width

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts."""
        return 0 if self.experts is None else self.sparse_layers * self.experts.num_experts * self.expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; a separate output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters without the multi-token prediction layers."""
        mixers = sum(self.count(mixer) * self.mixer_parameters(mixer) for mixer in MIXERS)
        dense = (len(self.layers) - self.sparse_layers) * self.dense_parameters
        sparse = self.sparse_layers * (self.shared_parameters + self.router_parameters) + self.routed_parameters
        norms = (NORM_WEIGHTS * len(self.layers) + 1) * self.hidden
        return mixers + dense + sparse + norms + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that process one token: all except idle experts and a separate input embedding."""
        idle = 0
        if self.experts is not None:
            idle = self.sparse_layers * (self.experts.num_experts - self.experts.per_token) * self.expert_parameters
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
        return 0 if self.experts is None else self.hidden * self.experts.num_experts

    def divided_tensors(self, mixer: str) -> tuple[int, ...]:
        """Return, for one layer's token mixer, the sizes in elements of the tensors that tensor parallelism divides.

        Queries, keys and values share one input projection, as in the trainer, except in latent attention. The result is empty
        if the model has no such mixer.
        """
        if mixer == ATTENTION and (a := self.attention):
            inputs = a.query * (2 if a.gated else 1) + 2 * a.key
            return (self.hidden * inputs, a.query * self.hidden, *(inputs,) * a.bias)
        if mixer == LATENT and (m := self.latent):
            parts = latent_parts(self.hidden, m)
            return (parts["query_up"], parts["kv_up"], parts["output"])
        if mixer == RECURRENT and (r := self.recurrence):
            inputs = self.hidden * (r.channels + r.values + 2 * r.value_heads)
            return (inputs, r.channels * r.conv_width, r.value_heads, r.value_heads, r.values * self.hidden)
        return ()

    def replicated_tensors(self, mixer: str) -> tuple[int, ...]:
        """Return, for one layer's token mixer, the sizes in elements of the tensors that each tensor parallel rank holds in full.

        These are norms and the down-projections of latent attention. The result is empty if the model has none of them.
        """
        if mixer == ATTENTION and (a := self.attention):
            return (a.head_dim,) * (2 * a.normed)
        if mixer == LATENT and (m := self.latent):
            queries = (self.hidden * m.query_rank, m.query_rank) if m.query_rank else ()
            return (*queries, self.hidden * (m.kv_rank + m.rope_dim), m.kv_rank)
        if mixer == RECURRENT and (r := self.recurrence):
            return (r.value_dim,)
        return ()

    def mixer_parameters(self, mixer: str) -> int:
        """Return the number of parameters of one layer's token mixer."""
        return sum(self.divided_tensors(mixer)) + sum(self.replicated_tensors(mixer))


def latent_parts(hidden: int, latent: LatentAttention) -> dict[str, int]:
    """Return the number of parameters of each projection of a latent attention layer, by name.

    ``down`` stands for all down-projections and their norms.
    """
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
