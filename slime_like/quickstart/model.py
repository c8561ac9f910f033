"""Small random models of the default jobs and a character tokenizer, in HF format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_like.quickstart.tool import TOKENS
from slime_like.util.imports import heavy_imports

SPECIAL = ("<pad>", "<eos>")
CHARACTERS = "0123456789+="
# Chat template of the tool job: a conversation has the same tokens as the concatenated messages of a rollout.
CONCATENATED_MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Gated DeltaNet layers, which replace attention except in every fourth layer."""

    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Experts in place of the MLP of each layer, and one shared expert (none if its size is 0)."""

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 40
    shared_expert_intermediate_size: int = 40
    norm_topk_prob: bool = True


@dataclass(frozen=True, slots=True)
class GroupedExpertSpec:
    """Experts of DeepSeek-V3, chosen within groups, in place of the MLP of all layers but the first, and one shared expert."""

    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    moe_intermediate_size: int = 80
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention of DeepSeek-V3."""

    q_lora_rank: int = 64
    kv_lora_rank: int = 48
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    num_nextn_predict_layers: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape, tokenizer and seed of the model.

    They are part of the stamp of the quickstart's files, which are rewritten if a value changes.
    """

    model_type: str = "qwen3"
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 32
    max_position_embeddings: int = 64
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02  # if embeddings are not tied, 0.08 gives smaller gradients of the embeddings
    linear: LinearSpec | None = None
    latent: LatentSpec | None = None
    experts: ExpertSpec | GroupedExpertSpec | None = None
    tool_tokens: tuple[str, ...] = ()  # special tokens of the tokenizer, after the characters
    chat_template: str | None = None
    seed: int = 0


DENSE = ModelSpec()
TOOL = ModelSpec(tool_tokens=TOKENS, chat_template=CONCATENATED_MESSAGES)
GDN = ModelSpec(model_type="qwen3_5_text", intermediate_size=256, num_hidden_layers=4, linear=LinearSpec())
NEXT = ModelSpec(  # SGLang's Qwen3-Next does not tie its output layer
    model_type="qwen3_next", num_hidden_layers=4, tie_word_embeddings=False, linear=LinearSpec(), experts=ExpertSpec()
)
LATENT = ModelSpec(  # head_dim is the rotated part of a head
    model_type="deepseek_v3",
    num_key_value_heads=4,
    head_dim=16,
    tie_word_embeddings=False,
    initializer_range=0.08,
    latent=LatentSpec(),
    experts=GroupedExpertSpec(),
)
MOE = ModelSpec(  # untied like NEXT; published models normalise the weights of a token's experts
    model_type="qwen3_moe",
    tie_word_embeddings=False,
    initializer_range=0.08,
    experts=ExpertSpec(moe_intermediate_size=80, shared_expert_intermediate_size=0),
)


def config_fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of the model's config.json except ``model_type``."""
    fields = {
        key: value
        for key, value in asdict(spec).items()
        if key not in ("model_type", "linear", "latent", "experts", "tool_tokens", "chat_template", "seed")
    }
    for part in (spec.linear, spec.latent, spec.experts):
        fields |= asdict(part) if part is not None else {}
    ids = {f"{name}_token_id": SPECIAL.index(f"<{name}>") for name in ("pad", "eos")}
    return fields | ids | {"bos_token_id": None, "dtype": "float32"}


def write_model(folder: Path, spec: ModelSpec) -> None:
    """Write config, random float32 weights and tokenizer to ``folder``, in the format that transformers and SGLang load."""
    with heavy_imports():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(spec.seed)
    config: Any = AutoConfig.for_model(spec.model_type, **config_fields(spec))
    model: Any = AutoModelForCausalLM.from_config(config)
    _fill_padding(model, config)
    model.save_pretrained(folder)
    write_tokenizer(folder, spec.tool_tokens, spec.chat_template)


def _fill_padding(model: Any, config: Any) -> None:
    """Replace the padding token's embedding, which transformers sets to zeros, with random numbers.

    A policy may sample any token. The gradient through a norm of zeros is about 1e3 times larger than elsewhere, and
    the norm of a key adds the same factor, so that one padding token would dominate a clipped step. A tied embedding
    needs no initialisation: it is also the output layer, which the first step changes.
    """
    import torch

    if not config.tie_word_embeddings:
        row = model.get_input_embeddings().weight[config.pad_token_id]
        torch.nn.init.normal_(row.detach(), std=config.initializer_range)


def write_tokenizer(folder: Path, tool_tokens: tuple[str, ...] = (), chat_template: str | None = None) -> None:
    """Write a tokenizer with tokens for padding and end, one per character, and one for each of ``tool_tokens``."""
    with heavy_imports():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS, *tool_tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(tool_tokens))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=chat_template
    ).save_pretrained(folder)
