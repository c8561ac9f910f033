"""The tokenizer of a checkpoint folder, without transformers where tokenizer.json alone says everything.

Importing transformers brings torch and takes seconds in a process that only turns text into ids and back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# With these classes transformers uses tokenizer.json as it stands; other settings than these could change what it does.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
PLAIN_SETTINGS = {*NAMED_TOKENS, "backend", "chat_template", "is_local", "model_max_length", "tokenizer_class"}
OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")
LARGE = 100_000  # from this size of a vocabulary on, transformers looks for a fault of some tokenizers and mends it


def open_tokenizer(folder: str) -> Any:
    """What ``transformers.AutoTokenizer`` gives, or the same at a hundredth of the time. Raises what transformers raises."""
    plain = _plain(Path(folder))
    if plain is not None:
        return plain
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class PlainTokenizer:
    """``tokenizers.Tokenizer`` behind the few members of transformers' tokenizers that this project uses.

    Any other member (a chat template's rendering, for one) is that of the transformers tokenizer, loaded when first asked for.
    """

    def __init__(self, folder: Path, backend: Any, settings: dict[str, Any]) -> None:
        self.name_or_path = str(folder)
        self.chat_template: Any = _template(folder, settings)
        self._backend = backend
        eos = settings.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)

    def __call__(
        self, texts: list[str], *, add_special_tokens: bool, return_attention_mask: bool
    ) -> dict[str, list[list[int]]]:
        """``{"input_ids": one list per text}``."""
        del return_attention_mask
        found = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in found]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _whole(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name_or_path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)


def _plain(folder: Path) -> PlainTokenizer | None:
    """The tokenizer of ``folder``, or None where its files say more than tokenizer.json does, or cannot be read."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        content = json.loads((folder / "tokenizer.json").read_text())
        special = {token["content"] for token in content["added_tokens"] if token["special"]}
        size = len(content["model"]["vocab"]) + len(content["added_tokens"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # transformers says what is wrong with it
    tokens = [settings[name] for name in NAMED_TOKENS if settings.get(name) is not None]
    as_it_stands = (
        settings.get("tokenizer_class") in PLAIN_CLASSES
        and settings.keys() <= PLAIN_SETTINGS
        and all(isinstance(token, str) and token in special for token in tokens)
        and content.get("truncation") is None
        and content.get("padding") is None
        and content.get("post_processor") is not None  # transformers would write one
        and size < LARGE
        and not any((folder / name).exists() for name in OTHER_FILES)
    )
    if not as_it_stands:
        return None
    from tokenizers import Tokenizer

    return PlainTokenizer(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), settings)


def _template(folder: Path, settings: dict[str, Any]) -> Any:
    path = folder / "chat_template.jinja"
    return path.read_text() if path.exists() else settings.get("chat_template")
