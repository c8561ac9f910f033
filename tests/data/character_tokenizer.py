"""Tokenizer built in memory: one token per character."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.name }}{% endfor %}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if think %}?{% endif %}"
)


def characters(*, template: str | None = None, eos: bool = True) -> Any:
    """Return a tokenizer of printable ASCII, one token per character, with ``[EOS]``.

    The return type is ``Any``, because transformers' signatures are wider than those of ``interfaces.Tokenizer``.
    """
    from transformers import PreTrainedTokenizerFast  # takes seconds

    alphabet = ["[EOS]", "[UNK]", *string.printable]
    model = Tokenizer(WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="[UNK]"))
    model.pre_tokenizer = Split(Regex("."), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    model.decoder = Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="[EOS]" if eos else None)
    tokenizer.name_or_path = "/models/tiny"
    tokenizer.chat_template = template
    return tokenizer
