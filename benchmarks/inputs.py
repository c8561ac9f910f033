"""Inputs for train.py and for TRL, in HF format: a random Qwen3, a tokenizer with a token per character, and prompts.

The end token lies outside the model's vocabulary: it cannot be sampled, so that every response of either program has
exactly ``NEW_TOKENS`` tokens, without a setting that could slow down one of them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, NEW_TOKENS, CONTEXT = 8, 8, 64, 128
TOKENS = PROMPTS * SAMPLES * NEW_TOKENS  # sampled per step
ROWS = 512
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "20m": {
        "vocab_size": 1024,
        "hidden_size": 384,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """Paths of model and rows, and the model's number of parameters."""

    model: Path
    rows: Path
    num_parameters: int


def write_inputs(folder: Path, size: str) -> BenchInputs:
    """Write a random model of ``size`` and random rows, both with seed 0, and a tokenizer. Return ``BenchInputs``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = SHAPES[size]
    end = shape["vocab_size"]
    config = Qwen3Config(
        **shape,  # pyright: ignore[reportArgumentType]
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=end,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    target = folder / f"model-{size}"
    model.save_pretrained(target)
    _write_tokenizer(target, end)
    rows = folder / "rows.jsonl"
    numbers = random.Random(0)
    lines = [{"prompt": f"{numbers.randint(0, 99)}+{numbers.randint(0, 99)}=", "label": "digits"} for _ in range(ROWS)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BenchInputs(target, rows, sum(parameter.numel() for parameter in model.parameters()))


def _write_tokenizer(folder: Path, end: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, **{chr(code): code - 31 for code in range(32, 127)}, "<eos>": end}
    backend: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
