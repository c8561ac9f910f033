"""Decoding of token ids by a table of bytes: the text equals the tokenizer's, or the table is not used."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from slime_like.data import tokenizer as module
from slime_like.data.tokenizer import _byte_characters, text_decoder

CHARACTERS = {byte: character for character, byte in _byte_characters().items()}
SPECIAL, EMOJI = "<|end|>", "🙂 plain"


class Decoded:
    """The part of a tokenizer that decodes. Counts its calls."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
        self.num_calls = 0

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        self.num_calls += 1
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def byte_level(decoder: Any = None) -> Decoded:
    """Return a tokenizer of all bytes, random byte strings, a special and an added token."""
    source = random.Random(0)
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [bytes(source.randrange(256) for _ in range(source.randint(2, 6))) for _ in range(500)]
    pieces += ["é".encode(), "語".encode()[:2], "語".encode()[2:], b" the", b"\xff\xfe"]
    vocabulary = {"".join(CHARACTERS[byte] for byte in piece): i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoder or decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([AddedToken(EMOJI, special=False)])
    return Decoded(backend)


TOKENIZER = byte_level()
DECODE = text_decoder(TOKENIZER)  # pyright: ignore[reportArgumentType]
SIZE = TOKENIZER.backend_tokenizer.get_vocab_size(with_added_tokens=True)


@given(st.lists(st.integers(0, SIZE + 3), max_size=60))
def test_the_text_is_that_of_the_tokenizer(token_ids: list[int]) -> None:
    assert DECODE(token_ids) == TOKENIZER.backend_tokenizer.decode(token_ids, skip_special_tokens=True)


def test_the_tokenizer_is_not_called_for_its_own_tokens() -> None:
    calls = TOKENIZER.num_calls
    ids: Any = [TOKENIZER.backend_tokenizer.token_to_id(token) for token in (EMOJI, SPECIAL)]
    assert [DECODE([token_id]) for token_id in ids] == [EMOJI, ""]
    assert TOKENIZER.num_calls == calls
    DECODE([SIZE])
    assert TOKENIZER.num_calls == calls + 1, "an id beyond the vocabulary"


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])])
def test_other_decoders_are_used_themselves(decoder: Any) -> None:
    tokenizer = byte_level(decoder)
    decode = text_decoder(tokenizer)  # pyright: ignore[reportArgumentType]
    decode([1, 2])
    assert tokenizer.num_calls == 1


def test_a_table_with_another_text_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {character: byte ^ 1 for byte, character in CHARACTERS.items()}
    monkeypatch.setattr(module, "_byte_characters", lambda: wrong)
    tokenizer = byte_level()
    decode = text_decoder(tokenizer)  # pyright: ignore[reportArgumentType]
    assert decode(list(b"abc")) == tokenizer.backend_tokenizer.decode(list(b"abc"))
