"""HTTP connections to one engine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine.replies import error_text
from slime_like.util.deadline import Deadline, scale
from slime_like.util.peers import end_with_lost_peer

KEEP_ALIVE_S = 60.0  # shorter than the server's, so that no request goes out on a connection about to be closed


class EngineConnection:
    """Requests to one engine, each with a deadline. Errors name engine, address, endpoint and the engine's reply.

    A node that loses power or its network link sends nothing that would end a request. The kernel therefore ends a
    connection whose peer has acknowledged nothing for ``peer_timeout_s``. The kernel of a node still acknowledges data for a
    stopped or busy process.
    """

    def __init__(self, address: EngineAddress, deadline_s: float, peer_timeout_s: float) -> None:
        self._address, self._deadline_s, self._peer_timeout_s = address, deadline_s, peer_timeout_s
        self._headers = {"Authorization": f"Bearer {address.admin_key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def post(self, phase: str, path: str, body: Any) -> Any:
        """Send a POST request and return the decoded JSON of the reply."""
        return await self.request(phase, "POST", path, body)

    async def request(
        self,
        phase: str,
        method: str,
        path: str,
        body: Any,
        accept: Sequence[int] = (200,),
        seconds: float | None = None,
    ) -> Any:
        """Send one HTTP request; return the decoded JSON of the reply, or None if the reply is empty or not JSON.

        Raises ``DeadlineExceeded``, ``EngineLost`` if the connection fails, ``EngineError`` if the status is not in ``accept``.
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
        if response.status not in accept:
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
        opened = socket.socket(family, kind, protocol)
        end_with_lost_peer(opened, self._peer_timeout_s * scale())
        return opened
