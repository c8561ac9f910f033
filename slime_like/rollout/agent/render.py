"""Conversations as token ids, and the tokens between two answers of one conversation.

A later call of a conversation must not render earlier answers again: tokenising their text may give other ids than the
model sampled, and templates drop or rewrite parts of old answers. Only the text *after* an answer is rendered: the
template renders the conversation with a mark in place of the answer, and the text after the mark is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from slime_like.data.chat import Tokenizer, render, tokenize
from slime_like.errors import ConfigError
from slime_like.rollout.agent.requests import ApiError, ChatRequest, Message
from slime_like.types import I32

MARK = "Xqz7answerStandsHereXqz7"


class Renderer:
    """Chat template of a tokenizer. ``data.chat_template_kwargs`` are defaults for those of a request."""

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)

    def conversation(self, request: ChatRequest) -> I32:
        """Return the tokens of a conversation up to the start of the answer."""
        return self._ids(self._text(request, request.messages))

    def after(self, request: ChatRequest, answer: int) -> I32:
        """Return the tokens from the end of the answer ``request.messages[answer]`` to the start of the next one.

        They start with the template's end-of-answer token, if it has one.
        """
        marked = {"role": "assistant", "content": MARK}
        text = self._text(request, [*request.messages[:answer], marked, *request.messages[answer + 1 :]])
        _, mark, following = text.rpartition(MARK)
        if not mark:
            raise ConfigError(
                "model.hf_checkpoint: its chat template does not write the content of an assistant message as it is, so "
                "that calls of one conversation cannot be joined; use another chat_template.jinja"
            )
        return self._ids(following)

    def stop_token(self, text: str) -> int:
        """Return the single token of ``text``. Raises ``ApiError`` if it is several: an engine stops at tokens."""
        ids = self._ids(text)
        if len(ids) != 1:
            raise ApiError(
                f"stop={text!r} is {len(ids)} tokens to this model, and only single tokens can be stopped at",
                param="stop",
            )
        return int(ids[0])

    def _text(self, request: ChatRequest, messages: Sequence[Message]) -> str:
        reserved = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}
        for name in sorted(reserved & request.template_kwargs.keys()):
            raise ApiError(
                f"chat_template_kwargs.{name} is no variable of a chat template but an argument of its rendering, which is "
                "not for a call to choose; leave it out",
                param="chat_template_kwargs",
            )
        kwargs = {**self._kwargs, **request.template_kwargs}
        if request.tools:
            kwargs["tools"] = [dict(tool) for tool in request.tools]
        # Fault boundary: a chat template is code of the tokenizer's author.
        try:
            return render(self._tokenizer, messages, kwargs)
        except Exception as error:
            raise ApiError(f"the chat template refused the messages: {error}", param="messages") from error

    def _ids(self, text: str) -> I32:
        return tokenize(self._tokenizer, [text])[0]
