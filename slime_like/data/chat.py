"""Rendering of chat messages by the tokenizer's chat template, and tokenization of texts.

Tokenization adds no special tokens: a template writes them itself, and a plain prompt is taken literally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from slime_like.errors import ConfigError
from slime_like.interfaces import Tokenizer
from slime_like.types import I32
from slime_like.util.reading import abbreviate, reason

Message = Mapping[str, Any]


def check_messages(prompt: object) -> list[Message]:
    """Return ``prompt`` as chat messages, without fields that are None.

    Raises ``ValueError`` unless it is a non-empty list of dicts, each with a string for ``role`` and ``content``.
    """
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"is {abbreviate(cast(object, prompt))}; it must be a string or a list of chat messages")
    messages: list[Message] = []
    for i, message in enumerate(cast(list[object], prompt)):
        if not isinstance(message, dict):
            raise ValueError(f"message {i} is {abbreviate(message)}; a chat message has a 'role' and a 'content'")
        fields = cast(dict[str, Any], message)
        for name in ("role", "content"):
            if not isinstance(fields.get(name), str):
                raise ValueError(f"message {i} has {name}={abbreviate(fields.get(name))}; it must be a string")
        # Parquet fills absent fields with None, which a template would treat as present.
        messages.append({name: value for name, value in fields.items() if value is not None})
    return messages


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    kwargs: Mapping[str, object],
    tools: Sequence[object] | None = None,
) -> str:
    """Return the text of a conversation including the assistant's generation prompt; ``tools`` are JSON schemas.

    Errors raised by the template are not converted.
    """
    template_kwargs = {**kwargs, "tools": list(tools)} if tools else kwargs
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **template_kwargs
    )
    return cast(str, text)


def tokenizer_folder(tokenizer: Tokenizer) -> str:
    """Return the tokenizer's folder for use in error messages, or its config key if the tokenizer does not know its folder."""
    return tokenizer.name_or_path or "model.hf_checkpoint"


def has_template(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(tokenizer.chat_template)


def require_template(tokenizer: Tokenizer, needed_by: str) -> None:
    """Raise ``ConfigError`` naming folder and ``needed_by`` if the tokenizer has no chat template."""
    if not has_template(tokenizer):
        folder = tokenizer_folder(tokenizer)
        raise ConfigError(
            f"the tokenizer in {folder!r} has no chat template, and {needed_by} needs one; add chat_template.jinja to "
            f"that folder, or use prompts that are plain strings with data.apply_chat_template=false"
        )


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> list[I32]:
    """Return the token ids of each text, encoded in one call because fast tokenizers process a batch in parallel.

    Raises ``ConfigError`` if the tokenizer fails.
    """
    if not texts:
        return []
    try:
        encodings = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    # Fault boundary of the tokenizer's code, which fails on a vocabulary without unk token, for example.
    except Exception as error:
        folder = tokenizer_folder(tokenizer)
        raise ConfigError(
            f"the tokenizer in {folder!r} cannot encode the data ({reason(error)}); copy the tokenizer files there again"
        ) from error
    return [np.array(ids, dtype=np.int32) for ids in cast(list[list[int]], encodings["input_ids"])]
