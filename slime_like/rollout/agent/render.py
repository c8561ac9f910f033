"""Render a conversation as token ids, or only its part between two answers (assistant messages).

A later call of a conversation must not render earlier answers again: tokenising their text may give ids other than the
sampled ones, and templates drop or rewrite parts of old answers. Only the text *after* an answer is needed. To get it, the
template renders the conversation with a marker in place of the answer, and the text up to the marker is discarded.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

from slime_like.data.chat import render, tokenize, tokenizer_folder
from slime_like.errors import ConfigError
from slime_like.interfaces import Tokenizer
from slime_like.rollout.agent.requests import ApiError, ChatRequest, Message
from slime_like.types import I32

MARK = "Xqz7answerStandsHereXqz7"


class Renderer:
    """Renderer for a tokenizer's chat template. A request's ``chat_template_kwargs`` override ``data.chat_template_kwargs``."""

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, object]) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)

    def conversation(self, request: ChatRequest) -> I32:
        """Return the tokens of a conversation up to the start of the next answer.

        Raises ``ApiError`` if the chat template refuses the messages, or the request sets a reserved template argument.
        """
        return self._ids(self._text(request, request.messages))

    def after_answer(self, request: ChatRequest, answer: int) -> I32:
        """Return the tokens from the end of the answer ``request.messages[answer]`` to the start of the next answer.

        They start with the template's end-of-answer token, if it has one. Raises ``ConfigError`` if the template alters
        the content of answers, and ``ApiError`` in the same cases as ``conversation``.
        """
        marked = Message(role="assistant", content=MARK)
        text = self._text(request, [*request.messages[:answer], marked, *request.messages[answer + 1 :]])
        _, mark, following = text.rpartition(MARK)
        if not mark:
            raise ConfigError(
                f"the chat template of the tokenizer in {tokenizer_folder(self._tokenizer)!r} changes the content of an assistant "
                "message, so calls of one conversation cannot be joined; use another chat_template.jinja there"
            )
        return self._ids(following)

    def stop_token(self, text: str) -> int:
        """Return the token of ``text``. Raises ``ApiError`` unless ``text`` is exactly one token: engines stop only at tokens."""
        ids = self._ids(text)
        if len(ids) != 1:
            raise ApiError(
                f"stop={text!r} is {len(ids)} tokens in this model's vocabulary; a stop text must be a single token",
                param="stop",
            )
        return int(ids[0])

    def _text(self, request: ChatRequest, messages: Sequence[Message]) -> str:
        argument_names = inspect.signature(self._tokenizer.apply_chat_template).parameters.keys() - {"kwargs"}
        for name in sorted(argument_names & request.chat_template_kwargs.keys()):
            raise ApiError(
                f"chat_template_kwargs.{name} is an argument of the template renderer, not a template variable; "
                f"requests cannot set it; leave it out",
                param="chat_template_kwargs",
            )
        kwargs = {**self._kwargs, **request.chat_template_kwargs}
        if request.tools:
            kwargs["tools"] = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        # Fault boundary: a chat template is third-party code.
        try:
            return render(self._tokenizer, [message.for_template() for message in messages], kwargs)
        except Exception as error:
            raise ApiError(f"the chat template refused the messages: {error}", param="messages") from error

    def _ids(self, text: str) -> I32:
        return tokenize(self._tokenizer, [text])[0]
