"""Decoding of token ids by a table of each token's bytes, for tokenizers whose text is the concatenated bytes of its tokens.

``tokenizers`` and transformers look each token up by name and convert its characters to bytes, at several hundred
nanoseconds per token, which would be the largest part of the rollout manager's work. Byte-level BPE (GPT-2, Qwen, Llama 3,
DeepSeek, GLM) needs only the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.interfaces import TokenIds, Tokenizer
from slime_like.types import I32


def text_decoder(tokenizer: Tokenizer) -> Callable[[TokenIds], str]:
    """Return a function that decodes token ids to the text of ``tokenizer.decode`` without special tokens.

    It uses the byte table only if that gives the tokenizer's text for the entire vocabulary, in ascending and descending
    order.
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
        """Return the text of tokens, without a Python loop over them. Raises ``IndexError`` for an unknown id."""
        lengths = self.lengths[token_ids]
        ends = np.cumsum(lengths, dtype=np.int32)
        index = np.repeat(self.starts[token_ids] - (ends - lengths), lengths)
        index += np.arange(len(index), dtype=np.int32)
        return self.content[index].tobytes().decode("utf-8", errors="replace")


def _byte_table(backend: Any) -> ByteTable | None:
    """Return the bytes of each token of a ``tokenizers.Tokenizer``; None unless it is byte-level BPE."""
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
    """Return character -> byte of a byte-level vocabulary. Source: ``bytes_to_unicode`` of GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other_bytes = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(other_bytes)}
