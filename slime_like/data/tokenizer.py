"""Tokenizer of a checkpoint folder, without transformers if tokenizer.json is sufficient, and a fast decoder of its tokens.

Importing transformers also imports torch and takes seconds in a process that only turns text into ids and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from slime_like.errors import ConfigError
from slime_like.interfaces import TokenIds, Tokenizer
from slime_like.types import I32
from slime_like.util.imports import heavy_imports
from slime_like.util.reading import InputFile, parse_json, reason

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# With one of these classes and only these settings, transformers uses tokenizer.json unchanged.
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
PLAIN_SETTINGS = {*NAMED_TOKENS, "backend", "chat_template", "is_local", "model_max_length", "tokenizer_class"}
OTHER_FILES = ("added_tokens.json", "special_tokens_map.json")
LARGE_VOCAB = 100_000  # from this size on, transformers detects and corrects a bug of some tokenizers


JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "chat_template.json", *OTHER_FILES)
TEXT_FILES = ("chat_template.jinja", "merges.txt")
Token = str | dict[str, Any] | None


class Settings(TypedDict, total=False):
    """Keys of a tokenizer_config.json that a tokenizer is built from, with types; other keys are allowed."""

    tokenizer_class: str | None
    bos_token: Token
    eos_token: Token
    pad_token: Token
    unk_token: Token
    model_max_length: int | float | None
    chat_template: str | list[dict[str, str]] | dict[str, str] | None


def open_tokenizer(folder: str, key: str = "model.hf_checkpoint") -> Any:
    """Return the tokenizer of ``transformers.AutoTokenizer``, or an equivalent one that loads a hundred times faster.

    Raises ``ConfigError`` if ``folder``, the value of ``key``, is not a folder or its tokenizer cannot be loaded.
    The error names ``key``, and the damaged file if it is known.
    """
    if not Path(folder).is_dir():  # transformers would try to download it
        raise ConfigError(f"{key}={folder!r} is not a folder: set it to the path of a downloaded Hugging Face model")
    _check_files(Path(folder), key)
    try:
        plain = _plain(Path(folder))
        if plain is not None:
            return plain
        return _auto_tokenizer(folder)
    # Fault boundary of tokenizers and transformers, whose parsers raise many types.
    except Exception as error:
        present = ", ".join(name for name in (*JSON_FILES, *TEXT_FILES) if (Path(folder) / name).exists())
        raise ConfigError(
            f"{key}={folder!r}: its tokenizer cannot be loaded from {present or 'a folder without its files'} "
            f"({reason(error)}); copy the tokenizer files there again"
        ) from error


def _check_files(folder: Path, key: str) -> None:
    """Raise ``ConfigError`` if a tokenizer file is damaged or a setting has a wrong type. Missing files are allowed."""
    for name in JSON_FILES:
        file = InputFile(folder / name, ConfigError, "copy the tokenizer files there again", key)
        if file.path.exists():
            values = file.json_object()
            if name == "tokenizer_config.json":
                file.typed(values, Settings)
    for name in TEXT_FILES:
        if (folder / name).exists():
            InputFile(folder / name, ConfigError, "copy the tokenizer files there again", key).text()


class PlainTokenizer:
    """``tokenizers.Tokenizer`` with those members of transformers' tokenizers that this project uses most.

    Other members (such as chat template rendering) come from the transformers tokenizer, which is loaded on first use.
    """

    def __init__(self, folder: Path, backend: Any, settings: dict[str, Any]) -> None:
        self.name_or_path = str(folder)
        self.chat_template: Any = _template(folder, settings)
        self._backend = backend
        eos = settings.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else backend.token_to_id(eos)

    def __call__(
        self,
        texts: list[str],
        *,
        add_special_tokens: bool,
        return_attention_mask: bool = False,
        return_offsets_mapping: bool = False,
    ) -> dict[str, list[Any]]:
        """Return ``{"input_ids": one list per text}``.

        With ``return_offsets_mapping``, ``offset_mapping`` has one list per text with each token's (start, stop) in characters.
        """
        del return_attention_mask
        encodings = self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        offsets = {"offset_mapping": [encoding.offsets for encoding in encodings]} if return_offsets_mapping else {}
        return {"input_ids": [encoding.ids for encoding in encodings], **offsets}

    @property
    def backend_tokenizer(self) -> Any:
        """Return the ``tokenizers.Tokenizer``, under the name that transformers gives it."""
        return self._backend

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def _full_tokenizer(self) -> Any:
        return _auto_tokenizer(self.name_or_path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._full_tokenizer, name)


def _auto_tokenizer(folder: str) -> Any:
    with heavy_imports():
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _plain(folder: Path) -> PlainTokenizer | None:
    """Return the tokenizer of ``folder`` loaded without transformers.

    The result is None if transformers might build a different tokenizer, or if a file is missing or unreadable.
    """
    try:
        settings = parse_json((folder / "tokenizer_config.json").read_bytes())
        content = parse_json((folder / "tokenizer.json").read_bytes())
        special = {token["content"] for token in content["added_tokens"] if token["special"]}
        size = len(content["model"]["vocab"]) + len(content["added_tokens"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # transformers raises the error
    tokens = [settings[name] for name in NAMED_TOKENS if settings.get(name) is not None]
    is_plain = (
        settings.get("tokenizer_class") in PLAIN_CLASSES
        and settings.keys() <= PLAIN_SETTINGS
        and all(isinstance(token, str) and token in special for token in tokens)
        and content.get("truncation") is None
        and content.get("padding") is None
        and content.get("post_processor") is not None  # transformers would add one
        and size < LARGE_VOCAB
        and not any((folder / name).exists() for name in OTHER_FILES)
    )
    if not is_plain:
        return None
    from tokenizers import Tokenizer

    return PlainTokenizer(folder, Tokenizer.from_file(str(folder / "tokenizer.json")), settings)


def _template(folder: Path, settings: dict[str, Any]) -> Any:
    path = folder / "chat_template.jinja"
    return path.read_text() if path.exists() else settings.get("chat_template")


def text_decoder(tokenizer: Tokenizer) -> Callable[[TokenIds], str]:
    """Return a function that decodes token ids to the same text as ``tokenizer.decode``, skipping special tokens.

    ``tokenizers`` and transformers look each token up by name and convert its characters to bytes, at several hundred
    nanoseconds per token, which would be the largest part of the rollout manager's work. Byte-level BPE (GPT-2, Qwen,
    Llama 3, DeepSeek, GLM) needs only the bytes of each token. A table of these bytes is used only if it decodes the
    entire vocabulary, in ascending and in descending order, to the same text as the tokenizer.
    """

    def decode(token_ids: TokenIds) -> str:
        ids: Sequence[int] = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        return tokenizer.decode(ids, skip_special_tokens=True)

    table = _byte_table(getattr(tokenizer, "backend_tokenizer", None))
    if table is None:
        return decode

    def decode_bytes(token_ids: TokenIds) -> str:
        try:
            return table.text(np.asarray(token_ids, dtype=np.int32))
        except IndexError:  # an id of a padded embedding, beyond the vocabulary
            return decode(token_ids)

    ids = np.arange(len(table.lengths), dtype=np.int32)
    if any(decode_bytes(order) != decode(order) for order in (ids, ids[::-1])):
        return decode
    return decode_bytes


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Bytes of each token of a vocabulary."""

    content: npt.NDArray[np.uint8]  # bytes of all tokens, one after another
    starts: I32  # [V]
    lengths: I32  # [V]

    def text(self, token_ids: I32) -> str:
        """Return the text of tokens, without a Python loop over them. Raises ``IndexError`` if an id is too large."""
        lengths = self.lengths[token_ids]
        ends = np.cumsum(lengths, dtype=np.int32)
        index = np.repeat(self.starts[token_ids] - (ends - lengths), lengths)
        index += np.arange(len(index), dtype=np.int32)
        return self.content[index].tobytes().decode("utf-8", errors="replace")


def _byte_table(backend: Any) -> ByteTable | None:
    """Return the bytes of each token of a ``tokenizers.Tokenizer``; None if it is not byte-level BPE.

    Special tokens have no bytes.
    """
    kinds = [type(getattr(backend, name, None)).__name__ for name in ("model", "decoder")]
    if kinds != ["BPE", "ByteLevel"]:
        return None
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    characters = _byte_characters()
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for token, index in vocabulary.items():
        if index not in special:
            try:
                table[index] = bytes([characters[character] for character in token])
            except KeyError:  # an added token with other characters
                table[index] = token.encode()
    lengths = np.array([len(token) for token in table], dtype=np.int32)
    content = np.frombuffer(b"".join(table), dtype=np.uint8)
    return ByteTable(content, np.cumsum(lengths, dtype=np.int32) - lengths, lengths)


def _byte_characters() -> dict[str, int]:
    """Return a dict from character to byte for byte-level vocabularies.

    Source: ``bytes_to_unicode`` of GPT-2's encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(other_bytes)}
