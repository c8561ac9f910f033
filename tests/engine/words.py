"""A tokenizer for the engine's random model: characters, chat marks, and words to which no text is tokenised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slime_like.data.tokenizer import open_tokenizer
from slime_like.interfaces import GenerateContext, Sampling
from tests.engine.conftest import VOCAB

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?+-_{}:\"'/"
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
END = 1  # the model's end of sequence


def write_words(folder: Path, tokens: Mapping[str, int] | None = None) -> Any:
    """Write a tokenizer with the model's vocabulary size. ``tokens`` maps special tokens to their ids.

    Every id without a character or a special token decodes to a word. Encoding this word gives the ids of its
    characters, not the id of the word.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds

    fixed_ids = {**(tokens or {}), "<|im_end|>": END}
    names = [name for name in ("<|im_start|>", *CHARACTERS) if name not in fixed_ids]
    free_ids = [i for i in range(VOCAB) if i not in fixed_ids.values()]
    vocabulary = {**fixed_ids, **dict(zip(names, free_ids, strict=False))}
    vocabulary |= {f"w{i}_": i for i in free_ids[len(names) :]}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([name for name in vocabulary if name.startswith("<")])
    wrapper = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_start|>")
    wrapper.chat_template = TEMPLATE
    wrapper.save_pretrained(folder)
    return open_tokenizer(str(folder))


def context(tokenizer: Any, *, group_id: int = 3, tokens: int = 60, max_len: int = 400) -> GenerateContext:
    """Return a generate context as the rollout manager passes it, at a temperature that affects log-probabilities."""
    return GenerateContext(
        sampling=Sampling(temperature=0.7, max_new_tokens=tokens, stop_token_ids=(END,)),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        group_id=group_id,
        first_sample_id=group_id * 4,
        max_context_len=max_len,
        tokenizer=tokenizer,
    )
