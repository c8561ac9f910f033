"""Replies in OpenAI's chat completion format, as one JSON body or as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_like.interfaces import Completion
from slime_like.rollout.agent.requests import ChatRequest


@dataclass(frozen=True, slots=True)
class AgentReply:
    """Reply to one chat completion call."""

    answer_id: str
    created: int  # unix seconds
    request: ChatRequest
    completion: Completion
    pieces: tuple[str, ...]  # text of each sampled token
    content: str
    calls: tuple[tuple[str, str, str], ...]  # id, name, arguments as JSON text
    num_prompt_tokens: int

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason."""
        if self.completion.finish != "stop":
            return "length"
        return "tool_calls" if self.calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of the call."""
        sampled = len(self.completion.token_ids)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.num_prompt_tokens + sampled,
        }

    @property
    def message(self) -> dict[str, Any]:
        """Assistant message in OpenAI's format."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.content if not self.calls else self.content or None,
        }
        if self.calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name, arguments in self.calls
            ]
        return message

    def body(self) -> dict[str, Any]:
        """Return the JSON body of a reply that is not streamed."""
        choice = {
            "index": 0,
            "message": self.message,
            "logprobs": self._logprobs(),
            "finish_reason": self.finish_reason,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self.usage}

    def events(self) -> Iterator[bytes]:
        """Yield the complete reply as server-sent events.

        Tokens are not sent as they arrive, so that a sample is recorded completely or not at all.
        """
        delta = self.message
        for i, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = i
        yield self._event(delta, None)
        yield self._event({}, self.finish_reason)
        if self.request.stream_options.include_usage:
            yield _line({**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _event(self, delta: dict[str, Any], finish: str | None) -> bytes:
        logprobs = self._logprobs() if delta else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _line({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.request.model}

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        values = self.completion.logprobs.tolist()
        return {
            "content": [
                {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, value in zip(self.pieces, values, strict=True)
            ],
            "refusal": None,
        }


def _line(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
