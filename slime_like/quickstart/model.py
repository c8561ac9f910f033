"""The default job's model: a small random Qwen3 and a tokenizer of characters, in HF format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SPECIAL = ("<pad>", "<eos>")
CHARACTERS = "0123456789+="


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of the model. Part of the cache's key."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 32
    max_position_embeddings: int = 64
    seed: int = 0


def write_model(folder: Path, spec: ModelSpec) -> None:
    """Write config, random float32 weights and tokenizer to ``folder``; transformers and SGLang load it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(spec.seed)
    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        eos_token_id=SPECIAL.index("<eos>"),
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
