"""Send HTTP requests to an SGLang server, and convert its JSON replies to arrays without a Python loop over tokens."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import aiohttp
import numpy as np
import orjson

from slime_like.data.routing import ROUTED_EXPERTS, RoutingShape
from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import Completion, EngineAddress
from slime_like.types import F32, I32, RoutedExperts
from slime_like.util.deadline import Deadline, scale
from slime_like.util.peers import end_with_lost_peer

LOGPROBS = "slime_like_logprobs"  # field that the plugin ``rollout_sampling`` adds: base64 of float32


def completions(reply: Any, num_samples: int, routing: RoutingShape | None = None) -> list[Completion]:
    """Return one completion per sample of the reply to a batched ``/generate``.

    If ``routing`` is given, the completions have routed experts; an aborted one may have none.
    Raises ``EngineError`` if the number of samples differs from ``num_samples`` or the reply is malformed.
    """
    return [_completion(item, routing) for item in _items(reply, num_samples, f"{num_samples} samples")]


def scores(reply: Any, lengths: Sequence[int]) -> list[F32]:
    """Parse the reply to a scoring ``/generate``: per sequence the log-probabilities of tokens 1 .. L - 1.

    Raises ``EngineError`` if the number of sequences or the length of one differs from ``lengths``, or the reply is malformed.
    """
    columns: list[F32] = []
    for item, length in zip(_scored_items(reply, lengths), lengths, strict=True):
        meta = _meta(item)
        if (num_scored := _read(meta, "input_token_logprobs", len)) != length:
            raise EngineError(f"/generate scored {num_scored} of {length} tokens of a sequence")
        # The first token has no predecessor, its entry is null.
        columns.append(_read(meta, "input_token_logprobs", lambda triples: _logprobs(triples[1:])))
    return columns


def scored_experts(reply: Any, lengths: Sequence[int], routing: RoutingShape) -> list[RoutedExperts]:
    """Return per sequence the experts [L - 1, layers, experts per token] of all its tokens but the last.

    Raises ``EngineError`` if the number of sequences differs from ``lengths``, or the reply is malformed.
    """
    items = _scored_items(reply, lengths)
    return [_experts(item, length - 1, routing) for item, length in zip(items, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class KvUsage:
    """KV cache usage of an engine since the previous report. The engine's scheduler updates it at every batch.

    With data-parallel attention, the engine has a cache per attention group: ``capacity_tokens`` and ``used_tokens_max`` are
    those of the fullest cache, ``running_requests_max`` and ``retractions`` are sums, and the others are maxima over groups.
    """

    capacity_tokens: int
    used_tokens_max: int  # tokens of running requests; cached prefixes that may be evicted do not count
    running_requests_max: int
    retractions: int  # requests that lost their KV cache because it was full; pauses for a push do not count
    decode_steps: int = 0
    dcp_exchange_s: float | None = None  # seconds that a rank spent in DCP exchanges; None if the engine has no DCP

    @property
    def share(self) -> float:
        """Peak usage relative to the capacity."""
        return self.used_tokens_max / self.capacity_tokens


def kv_usage(reply: Any) -> KvUsage:
    """Parse the reply to ``/server_info``.

    Raises ``EngineError`` if the reply is malformed, for example because the engine runs without the plugin ``kv_usage``.
    """
    try:
        groups = [KvUsage(**state["slime_like_kv"]) for state in reply["internal_states"]]
        fullest = max(groups, key=lambda group: group.share)
    except (TypeError, KeyError, ValueError, ZeroDivisionError) as error:
        raise EngineError(
            "/server_info has no slime_like_kv: the engine's installation lacks the entry point slime_like_kv_capacity; run "
            "bash scripts/setup.sh"
        ) from error
    return KvUsage(
        fullest.capacity_tokens,
        fullest.used_tokens_max,
        sum(group.running_requests_max for group in groups),
        sum(group.retractions for group in groups),
        max(group.decode_steps for group in groups),
        max((group.dcp_exchange_s for group in groups if group.dcp_exchange_s is not None), default=None),
    )


def any_aborted(reply: Any) -> bool:
    """Return whether any request of the reply was aborted; False if the reply is not a list.

    Raises ``EngineError`` if an item is malformed.
    """
    return isinstance(reply, list) and any(_finish(item) == "abort" for item in reply)  # pyright: ignore[reportUnknownVariableType]


def weight_version(reply: Any) -> int:
    """Parse a reply to ``/model_info``, and return the version of the last committed update.

    Raises ``EngineError`` if the reply has no version, or if it is not a number.
    """
    return _read(reply, "weight_version", _version, "/model_info")


def error_text(status: int, body: bytes, reply: Any) -> str:
    """Return the HTTP status and the error message of a reply, which may have any of SGLang's error formats.

    SGLang joins the messages of data-parallel groups; equal ones are merged.
    """
    message: Any = reply
    for name in ("error", "message", "detail"):
        if isinstance(message, dict) and name in message:
            message = message[name]  # pyright: ignore[reportUnknownVariableType]
    text = message if isinstance(message, str) else body.decode(errors="replace")
    text = " | ".join(dict.fromkeys(text.strip().split(" | ")))
    return f"HTTP {status}: {text[:2000] or '(no message)'}"


def _completion(item: Any, routing: RoutingShape | None) -> Completion:
    token_ids: I32 = _read(item, "output_ids", lambda value: _column(value, np.int32))
    meta, finish = _meta(item), _finish(item)
    if not len(token_ids) and finish == "abort":  # the request may never have been scheduled
        return Completion(token_ids, np.zeros(0, np.float32), (), finish, *_prompt(meta))
    logprobs: F32 = (
        _read(meta, LOGPROBS, lambda value: _column(value, np.float32))
        if LOGPROBS in meta
        else _read(meta, "output_token_logprobs", _logprobs)
    )
    if len(logprobs) != len(token_ids):
        raise EngineError(f"/generate returned {len(token_ids)} tokens but {len(logprobs)} log-probabilities")
    spans = _read(meta, "weight_versions", _spans)
    if not len(token_ids):
        spans = ()  # SGLang returns one empty span
    experts = None
    if routing is not None and (
        finish != "abort" or ROUTED_EXPERTS in meta
    ):  # experts are absent if the request was aborted before it was scheduled again
        experts = _experts(item, _prompt(meta)[0] + len(token_ids) - 1, routing)
    return Completion(token_ids, logprobs, spans, finish, *_prompt(meta), experts)


def _column(value: Any, dtype: type[np.generic]) -> Any:
    """Return [N] numbers that the engine sent in base64 or, if it lacks the plugin ``rollout_sampling``, as a list."""
    if not isinstance(value, str):
        return np.fromiter(value, dtype=dtype, count=len(value))
    try:
        return np.frombuffer(base64.b64decode(value, validate=True), dtype=dtype)
    except ValueError as error:
        raise ValueError(f"not base64 of {np.dtype(dtype)}: {error}") from error


def _experts(item: Any, num_tokens: int, routing: RoutingShape) -> RoutedExperts:
    return _read(
        _meta(item),
        ROUTED_EXPERTS,
        lambda text: routing.parse(base64.b64decode(text, validate=True), num_tokens),
    )


def _prompt(meta: dict[str, Any]) -> tuple[int, int]:
    """Return (number of prompt tokens, number of cached ones); zeros for a request aborted before it was scheduled."""
    num_prompt, num_cached = (
        _read(meta, name, int) if name in meta else 0 for name in ("prompt_tokens", "cached_tokens")
    )
    return num_prompt, num_cached


def _logprobs(triples: Sequence[Any]) -> F32:
    """Return [N], the log-probabilities of N ``[log-probability, token, text]`` triples, without a Python loop."""
    return np.fromiter(map(itemgetter(0), triples), dtype=np.float32, count=len(triples))


def _spans(spans: Sequence[Any]) -> tuple[tuple[int, int, int], ...]:
    """Return (start, stop, weight version) of each span of tokens."""
    return tuple((int(span["start"]), int(span["end"]), _version(span["version"])) for span in spans)


def _version(text: Any) -> int:
    if not str(text).isdecimal():
        raise EngineError(
            f"engine serves weight version {text!r}, which is not a number: does another program push weights to it?"
        )
    return int(text)


def _items(reply: Any, number: int, expected: str) -> list[Any]:
    if not isinstance(reply, list) or len(reply) != number:  # pyright: ignore[reportUnknownArgumentType]
        raise EngineError(f"/generate returned {_short(reply)} instead of {expected}")
    return reply  # pyright: ignore[reportUnknownVariableType]


def _scored_items(reply: Any, lengths: Sequence[int]) -> list[Any]:
    return _items(reply, len(lengths), f"scores of {len(lengths)} sequences")


def _meta(item: Any) -> dict[str, Any]:
    return _read(item, "meta_info", _mapping)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return value  # pyright: ignore[reportUnknownVariableType]


def _finish(item: Any) -> str:
    return _read(_meta(item), "finish_reason", lambda reason: str(reason["type"]))


def _read[T](item: Any, name: str, convert: Callable[[Any], T], path: str = "/generate") -> T:
    """Return field ``name`` of a part of the reply to ``path``, converted by ``convert``.

    Raises ``EngineError`` naming the field if it is missing or cannot be converted.
    """
    if not isinstance(item, dict) or name not in item:
        raise EngineError(f"{path} returned no {name!r}: {_short(item)}")
    value: Any = item[name]
    try:
        return convert(value)
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise EngineError(
            f"{path} returned {name}={_short(value)}, which cannot be read ({type(error).__name__}: {error})"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


KEEP_ALIVE_S = 60.0  # shorter than the server's, so that no request goes out on a connection about to be closed


class EngineConnection:
    """HTTP connections to one engine. Each request has a deadline; errors name engine, address, endpoint and any reply.

    A node that loses power or its network link sends nothing that would end a request. The kernel therefore ends a
    connection whose peer has acknowledged nothing for ``peer_timeout_s``. For a suspended (SIGSTOP) or busy process, the
    kernel of its node still acknowledges data until the receive buffer is full.
    """

    def __init__(self, address: EngineAddress, deadline_s: float, peer_timeout_s: float) -> None:
        self._address, self._deadline_s, self._peer_timeout_s = address, deadline_s, peer_timeout_s
        self._headers = {"Authorization": f"Bearer {address.admin_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def post(self, phase: str, path: str, body: Any) -> Any:
        """Send a POST request with the default deadline. Same result and errors as ``request``."""
        return await self.request(phase, "POST", path, body)

    async def request(
        self,
        phase: str,
        method: str,
        path: str,
        body: Any,
        seconds: float | None = None,
    ) -> Any:
        """Send one HTTP request; return the decoded JSON of the reply, or None if the reply is empty or not JSON.

        Raises ``DeadlineExceeded`` if there is no reply in time, ``EngineLost`` if the connection fails,
        ``EngineError`` if the status is not 200.
        """
        deadline = Deadline("rollout", phase, seconds or self._deadline_s)
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        timeout = aiohttp.ClientTimeout(total=deadline.remaining(self._describe(path)))
        try:
            async with self._pool().request(method, self._address.url + path, data=data, timeout=timeout) as response:
                content = await response.read()
        except TimeoutError as error:
            raise deadline.exceeded(self._describe(path)) from error
        except aiohttp.ClientError as error:
            raise EngineLost(f"{self._describe(path)}: {error or type(error).__name__}") from error
        try:
            reply = orjson.loads(content) if content else None
        except orjson.JSONDecodeError:
            reply = None
        if response.status != 200:
            raise EngineError(f"{self._describe(path)}: {error_text(response.status, content, reply)}")
        return reply

    async def close(self) -> None:
        """Close the connections; the engine keeps running."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _describe(self, path: str) -> str:
        return f"{self._address.name} at {self._address.url}{path}"

    def _pool(self) -> aiohttp.ClientSession:
        """Return the connection pool, created on first use in the running event loop.

        It has no limit, since a request that waits for a connection would delay its group.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=self._open_socket)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _open_socket(self, address: tuple[Any, ...]) -> socket.socket:
        """Return a socket that fails once its peer has acknowledged neither data nor probes for ``peer_timeout_s``."""
        family, kind, protocol, *_ = address
        connection = socket.socket(family, kind, protocol)
        end_with_lost_peer(connection, self._peer_timeout_s * scale())
        return connection
