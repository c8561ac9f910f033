"""The endpoint itself: one HTTP server of a run, on loopback; a key says which session a call belongs to."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime_like.rollout.agent.replies import AgentReply
from slime_like.rollout.agent.requests import ApiError, ChatRequest, parse_request
from slime_like.rollout.agent.session import Session
from slime_like.util.deadline import Deadline
from slime_like.util.together import being_cancelled

HOST = "127.0.0.1"
LARGEST = 16 * 2**20  # bytes of a request's body, whatever its session would take
READ_S = 60.0  # longest time a client may take to send one
CUT_S = 1.0  # what is in flight at the end gets to end
MODEL = "policy"


@dataclass(slots=True, eq=False)
class AgentConnection:
    """A session that has a key, and what is being answered of it."""

    session: Session
    calls: set[asyncio.Task[AgentReply]] = field(default_factory=set[asyncio.Task[AgentReply]])
    gone: bool = False


class Endpoint:
    """``open`` it in the event loop that the engines' clients live in. Keys are random, and end with their session."""

    def __init__(self) -> None:
        self._guests: dict[str, AgentConnection] = {}
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()
        self.base_url = ""

    async def open(self) -> None:
        """Listen, unless it does."""
        async with self._opening:
            if self._runner is not None:
                return
            app = web.Application(middlewares=[_in_openai_format], client_max_size=LARGEST)
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_get("/v1/models", self._models)
            # A client that gives up takes its call with it: what it never read is not recorded.
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CUT_S)
            await runner.setup()
            await web.TCPSite(runner, HOST, 0).start()
            self._runner = runner
            self.base_url = f"http://{HOST}:{runner.addresses[0][1]}/v1"

    def admit(self, session: Session) -> str:
        """The key of calls that belong to ``session``."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._guests[key] = AgentConnection(session)
        return key

    def dismiss(self, key: str) -> None:
        """Calls with ``key`` are refused from now on, and those in flight cut."""
        guest = self._guests.pop(key)
        guest.gone = True
        for call in guest.calls:
            call.cancel()

    async def close(self) -> None:
        """Stop listening; calls in flight are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _guest(self, request: web.Request) -> AgentConnection:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        guest = self._guests.get(key.strip()) if scheme.lower() == "bearer" else None
        if guest is None:
            raise _no_key()
        return guest

    async def _models(self, request: web.Request) -> web.Response:
        self._guest(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "slime_like"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        guest = self._guest(request)
        asked = await _read(request, min(LARGEST, guest.session.most_bytes))
        answer = await _answered(guest, asked)
        if not asked.stream:
            return web.json_response(answer.whole())
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await reply.prepare(request)
        for event in answer.events():
            await reply.write(event)
        await reply.write_eof()
        return reply


async def _read(request: web.Request, most: int) -> ChatRequest:
    deadline = Deadline("agents' endpoint", "read", READ_S)
    try:
        body = await asyncio.wait_for(request.clone(client_max_size=most).read(), deadline.limit)
    except TimeoutError as error:
        raise ApiError(str(deadline.exceeded("the request's body")), status=408) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            f"the body has more than {most} bytes, which is more than a conversation of rollout.max_context_len tokens",
            status=413,
        ) from error
    return parse_request(body)


async def _answered(guest: AgentConnection, asked: ChatRequest) -> AgentReply:
    if guest.gone:
        raise _no_key()
    if guest.session.failure is not None:
        raise ApiError("the run is ending", status=500)
    call = asyncio.ensure_future(guest.session.answer(asked))
    guest.calls.add(call)
    call.add_done_callback(guest.calls.discard)
    try:
        return await call
    except ApiError:
        raise
    except asyncio.CancelledError as error:
        if being_cancelled():
            raise
        raise _no_key() from error
    except Exception as error:  # fault boundary: whoever runs the agent raises it, not the agent
        guest.session.failure = error
        raise ApiError(f"the engine failed: {error}", status=500) from error


def _no_key() -> ApiError:
    return ApiError(
        "this key belongs to no running agent: use the api_key that the agent was called with, while it runs",
        status=401,
        code="invalid_api_key",
    )


@web.middleware
async def _in_openai_format(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every refusal as OpenAI's clients read it; none of them is worth a second try."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        error = ApiError(
            f"there is no {request.method} {request.path} here: /v1/chat/completions and /v1/models are", status=404
        )
    except web.HTTPException as found:
        error = ApiError(found.text or found.reason, status=found.status)
    except ApiError as found:
        error = found
    return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})
