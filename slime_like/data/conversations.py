"""Tokenization of conversations for supervised fine-tuning, which trains on the assistant turns only.

There are two methods, as in slime (``slime/utils/mask_utils.py``, ``--loss-mask-type qwen`` and ``qwen3_5``). ``turns`` renders
each message by the chat template on its own, so that a turn does not depend on later messages, as in verl's multi-turn
dataset. ``whole`` renders all messages together, as an engine would see them, and finds the turns by ChatML's markers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from slime_like.data.chat import Message, require_template, tokenizer_folder
from slime_like.errors import ConfigError, DataError
from slime_like.interfaces import Tokenizer
from slime_like.types import I32
from slime_like.util.reading import reason

HEADER, THINK, END = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>"
PLACEHOLDER = "PLACEHOLDER"
type Ranges = list[tuple[int, int]]  # (start, stop) characters of a text whose tokens are trained on


def is_conversation(messages: Sequence[Message]) -> bool:
    """Return whether chat messages end with an assistant turn, so that no label is needed."""
    return bool(messages) and messages[-1]["role"] == "assistant"


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """Tokens of a conversation, with a mask of the tokens to train on."""

    token_ids: I32  # [L]
    trained: npt.NDArray[np.bool_]  # [L]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Tokenizer of conversations, which it renders by the chat template."""

    tokenizer: Tokenizer
    method: str = "turns"  # data.conversation: turns or whole
    kwargs: Mapping[str, Any] | None = None  # arguments of the chat template

    def mark(self, messages: Sequence[Message], tools: object, location: str) -> MaskedTokens:
        """Return the tokens of ``messages``, with a mask of the tokens that are trained on.

        Raises ``DataError`` naming ``location`` if the template rejects the messages, if no token is trained on, or, with
        method ``whole``, if a message or tool contains a marker of an answer. Raises ``ConfigError`` if the tokenizer or its
        chat template is unsuitable, such as a template that enforces alternating roles with method ``turns``.
        """
        require_template(self.tokenizer, "a conversation")
        pieces = (
            self._turns(messages, tools, location)
            if self.method == "turns"
            else self._conversation(messages, tools, location)
        )
        encodings = self._encode([text for text, _ in pieces], location)
        ids: list[int] = []
        trained: list[bool] = []
        for (_, ranges), token_ids, offsets in zip(
            pieces, encodings["input_ids"], encodings["offset_mapping"], strict=True
        ):
            ids += token_ids
            trained += [any(a < stop and b > start for start, stop in ranges) and b > a for a, b in offsets]
        if not any(trained):
            raise DataError(f"{location}: no token of an assistant turn is trained on; remove the row")
        return MaskedTokens(np.array(ids, dtype=np.int32), np.array(trained, dtype=np.bool_))

    def _turns(self, messages: Sequence[Message], tools: object, location: str) -> list[tuple[str, Ranges]]:
        opening, generation = self._frame()
        pieces: list[tuple[str, Ranges]] = []
        for i, message in enumerate(messages):
            text = self._turn(message, location, tools if i == 0 else None)
            if i and message["role"] != "system":
                text = text[opening:]
            if not _is_trained(message):
                pieces.append((text, []))
                continue
            if not text.startswith(generation):
                raise ConfigError(
                    f"data.conversation=turns: the chat template opens an answer with {generation!r}, but an assistant turn "
                    f"rendered alone begins with {text[: len(generation)]!r}; set data.conversation=whole"
                )
            pieces.append((text, [(len(generation), len(text))]))
        return pieces

    def _frame(self) -> tuple[int, str]:
        """Return the number of characters that the template writes before the first turn, and its generation prompt.

        Raises ``ConfigError`` if the template omits or refuses a message.
        """
        two_turns = self._placeholders("user", "user")
        first, second = two_turns.find(PLACEHOLDER), two_turns.rfind(PLACEHOLDER)
        if not 0 <= first < second:
            raise ConfigError(
                "data.conversation=turns: the chat template leaves out a message; set data.conversation=whole"
            )
        suffix_len = len(two_turns) - second - len(PLACEHOLDER)
        header_len = (second - first) - suffix_len - len(PLACEHOLDER)
        once, open_turn = self._placeholders("user"), self._placeholders("user", generation=True)
        return first - header_len, open_turn[len(once) :]

    def _turn(self, message: Message, location: str, tools: object) -> str:
        """Render a message alone.

        Raises ``ConfigError`` if the template refuses every assistant turn that is alone, ``DataError`` if it refuses only this
        message.
        """
        try:
            return self._render([message], location, tools=tools)
        except DataError:
            if message["role"] == "assistant":
                self._placeholders("assistant")
            raise

    def _placeholders(self, *roles: str, generation: bool = False) -> str:
        """Render messages of these roles. Raises ``ConfigError`` if the template refuses them."""
        messages = [{"role": role, "content": PLACEHOLDER} for role in roles]
        try:
            return self._render(messages, "data.conversation=turns", generation=generation)
        except DataError as error:
            raise ConfigError(
                f"{error}; the messages had the role{'s' * (len(roles) > 1)} {', '.join(roles)}, as turns are rendered separately: "
                f"set data.conversation=whole if the template writes ChatML ({HEADER!r}), or change the template"
            ) from error

    def _conversation(self, messages: Sequence[Message], tools: object, location: str) -> list[tuple[str, Ranges]]:
        _check_markers(messages, tools, location)
        text = self._render(messages, location, tools=tools)
        ranges: Ranges = []
        cursor = 0
        for message in (message for message in messages if message["role"] == "assistant"):
            start, stop = text.find(HEADER, cursor), -1
            if start >= 0:
                start += len(HEADER)
                stop = text.find(END, start)
            if start < 0 or stop < 0:
                raise ConfigError(
                    f"{location}: data.conversation=whole finds turns by {HEADER!r} and {END!r}, which the chat template does "
                    "not write; set data.conversation=turns"
                )
            cursor = stop + len(END)
            cursor += text.startswith("\n", cursor)
            if _is_trained(message):
                ranges.append((start + len(THINK) * text.startswith(THINK, start), cursor))
        return [(text, ranges)]

    def _render(
        self, messages: Sequence[Message], location: str, *, tools: object = None, generation: bool = False
    ) -> str:
        # Fault boundary: a chat template is third-party code.
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation,
                **({"tools": tools} if tools else {}),
                **(self.kwargs or {}),
            )
        except Exception as error:
            raise DataError(f"{location}: the chat template refused the conversation: {error}") from error
        return cast(str, text)

    def _encode(self, texts: list[str], location: str) -> Mapping[str, Any]:
        try:
            return self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError as error:
            raise ConfigError(
                f"the tokenizer in {self.tokenizer.name_or_path!r} is a slow tokenizer without token offsets; conversations need its "
                f"tokenizer.json"
            ) from error
        # Fault boundary of the tokenizer's code, as in ``tokenize``.
        except Exception as error:
            raise ConfigError(
                f"{location}: the tokenizer in {tokenizer_folder(self.tokenizer)!r} cannot encode the conversation ({reason(error)}); "
                "copy the tokenizer files there again, or correct the row"
            ) from error


def _check_markers(messages: Sequence[Message], tools: object, location: str) -> None:
    """Raise ``DataError`` if a tool or message contains text that would be taken for the beginning or end of an answer."""
    places: list[tuple[str, object, tuple[str, ...]]] = [("a tool", tools, (HEADER,))]
    for message in messages:
        markers = (HEADER, END) if message["role"] == "assistant" else (HEADER,)
        places.append((f"a message of role {message['role']!r}", dict(message), markers))
    for name, value, markers in places:
        for marker in markers:
            if any(marker in text for text in _texts(value)):
                raise DataError(
                    f"{location}: {name} contains {marker!r}, by which data.conversation=whole finds turns: remove the row, or set "
                    "data.conversation=turns"
                )


def _texts(value: object) -> Iterator[str]:
    """Yield every text within nested dicts and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in cast("Sequence[object]", value):
            yield from _texts(item)


def _is_trained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1
