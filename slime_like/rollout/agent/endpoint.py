"""HTTP endpoint for agents: one server per rollout manager, on loopback. The API key of a call identifies its session."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime_like.rollout.agent.replies import AgentReply
from slime_like.rollout.agent.requests import ApiError, ChatRequest, parse_request
from slime_like.rollout.agent.session import Session
from slime_like.util.concurrency import is_task_cancelled
from slime_like.util.deadline import Deadline

HOST = "127.0.0.1"
MAX_BODY_BYTES = 16 * 2**20  # upper limit of a request body, in any session
READ_S = 60.0  # time limit for receiving a request body
SHUTDOWN_S = 1.0  # time for calls in flight to finish at shutdown
MODEL = "policy"


@dataclass(slots=True, eq=False)
class AgentConnection:
    """A session that has a key, and the calls of this session that are in progress."""

    session: Session
    calls: set[asyncio.Task[AgentReply]] = field(default_factory=set[asyncio.Task[AgentReply]])
    closed: bool = False


class Endpoint:
    """Server for agents. Call ``open`` in the event loop of the engine clients. Keys are random and expire with the session."""

    def __init__(self) -> None:
        self._connections: dict[str, AgentConnection] = {}
        self._runner: web.AppRunner | None = None
        self._open_lock = asyncio.Lock()
        self.base_url = ""

    async def open(self) -> None:
        """Start listening. Idempotent."""
        async with self._open_lock:
            if self._runner is not None:
                return
            app = web.Application(middlewares=[_in_openai_format], client_max_size=MAX_BODY_BYTES)
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_get("/v1/models", self._models)
            # A disconnect cancels the call, so that an answer is not recorded if the client does not get it.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            self._runner = runner
            self.base_url = f"http://{HOST}:{runner.addresses[0][1]}/v1"

    def open_session(self, session: Session) -> str:
        """Register ``session`` and return a new key for its calls."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._connections[key] = AgentConnection(session)
        return key

    def close_session(self, key: str) -> None:
        """Reject further calls with ``key``, and cancel the calls in flight."""
        connection = self._connections.pop(key)
        connection.closed = True
        for call in connection.calls:
            call.cancel()

    async def close(self) -> None:
        """Stop listening; give calls in flight a short time (``SHUTDOWN_S``) to finish, then cancel them."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _connection(self, request: web.Request) -> AgentConnection:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        connection = self._connections.get(key.strip()) if scheme.lower() == "bearer" else None
        if connection is None:
            raise _invalid_key()
        return connection

    async def _models(self, request: web.Request) -> web.Response:
        self._connection(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "slime_like"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        connection = self._connection(request)
        chat_request = await _read(request, min(MAX_BODY_BYTES, connection.session.max_body_bytes))
        answer = await _call_session(connection, chat_request)
        if not chat_request.stream:
            return web.json_response(answer.body())
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await reply.prepare(request)
        for event in answer.events():
            await reply.write(event)
        await reply.write_eof()
        return reply


async def _read(request: web.Request, max_bytes: int) -> ChatRequest:
    deadline = Deadline("agents' endpoint", "read", READ_S)
    try:
        body = await asyncio.wait_for(request.clone(client_max_size=max_bytes).read(), deadline.limit)
    except TimeoutError as error:
        raise ApiError(str(deadline.exceeded("the request's body")), status=408) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            f"the body has more than {max_bytes} bytes, which is more than a conversation of rollout.max_context_len tokens",
            status=413,
        ) from error
    return parse_request(body)


async def _call_session(connection: AgentConnection, chat_request: ChatRequest) -> AgentReply:
    if connection.closed:
        raise _invalid_key()
    if connection.session.failure is not None:
        raise ApiError("the run is ending", status=500)
    call = asyncio.ensure_future(connection.session.answer(chat_request))
    connection.calls.add(call)
    call.add_done_callback(connection.calls.discard)
    try:
        return await call
    except ApiError:
        raise
    except asyncio.CancelledError as error:
        if is_task_cancelled():
            raise
        raise _invalid_key() from error
    except Exception as error:  # fault boundary: the agent only gets status 500; ``OpenAIAgent`` raises the error later
        connection.session.failure = error
        raise ApiError(f"the engine failed: {error}", status=500) from error


def _invalid_key() -> ApiError:
    return ApiError(
        "this key belongs to no running agent: use the api_key passed to the agent, while it runs",
        status=401,
        code="invalid_api_key",
    )


@web.middleware
async def _in_openai_format(request: web.Request, handler: Any) -> web.StreamResponse:
    """Middleware that returns HTTP errors and ``ApiError`` in OpenAI's format, with a header that tells clients not to retry."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        error = ApiError(
            f"there is no {request.method} {request.path} here; this server has /v1/chat/completions and /v1/models",
            status=404,
        )
    except web.HTTPException as refusal:
        error = ApiError(refusal.text or refusal.reason, status=refusal.status)
    except ApiError as refusal:
        error = refusal
    return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})
