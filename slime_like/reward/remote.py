"""Reward ``remote_rm``: scores from an HTTP server, with retries within one deadline. A run survives a server outage.

A request has the body of slime's rm_type ``remote_rm``: ``{"prompt": ..., "response": ..., "label": ...}``. The server
returns a number, or an object with ``score`` and optionally ``acc`` (0 to 1).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from slime_like.config.schema.rollout import RewardConfig
from slime_like.data.faults import Recovery
from slime_like.errors import RewardError
from slime_like.reward.outage import Outage
from slime_like.reward.worker import validated_reward
from slime_like.types import Prompt, Reward, Sample
from slime_like.util.deadline import Deadline

PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_ANSWER_BYTES = 2**20  # a score, and optional fields that are ignored
WRONG_ADDRESS = (301, 302, 307, 308, 401, 403, 404, 405)  # neither a retry nor another sample will succeed
BUSY = (408, 425, 429)  # 4xx codes that permit a retry

HEADERS = {"Accept-Encoding": "identity"}  # no compression: a short body could expand to a large one
EXPECTED = 'a reward server must return a finite number, or an object such as {"score": 0.5, "acc": 1}'


class ServerFailed(Exception):
    """Error of a sample that the server did not score. Internal to this package."""


class SampleRefused(ServerFailed):
    """Error of a sample that the server refused by an HTTP status such as 422. The server is up, and may score other samples."""


class _Transient(ServerFailed):
    """Failure after which the request may be sent again."""


class RemoteReward:
    """Client of ``reward.remote_url``, bound to one event loop.

    While the server is down, each sample is sent once, without retries.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._semaphore = asyncio.Semaphore(config.remote_concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._down = False
        self._outages: list[Outage] = []  # injected outages, oldest first
        self.num_retries = 0

    async def __call__(self, prompt: Prompt, sample: Sample) -> Reward:
        """Return the server's score.

        Raises ``SampleRefused`` if the server refuses the sample, ``ServerFailed`` if all attempts fail, ``DeadlineExceeded``
        if they take longer than ``reward.timeout_s``, and ``RewardError`` if the address is wrong or the response is not a
        score. The time limit does not include the wait for one of the ``reward.remote_concurrency`` slots.
        """
        body = {"prompt": prompt.text, "response": sample.text, "label": prompt.label}
        async with self._semaphore:
            attempts = AsyncRetrying(
                stop=stop_after_attempt(1 if self._down else 1 + self._config.remote_retries),
                wait=wait_random_exponential(PAUSE_S, MAX_PAUSE_S),
                retry=retry_if_exception_type(_Transient),
                before_sleep=self._count,
                reraise=True,
            )
            deadline = Deadline("reward pool", "score", self._config.timeout_s)
            try:
                async with asyncio.timeout(deadline.limit):
                    answer = await attempts(self._post, body)
            except TimeoutError as error:
                self._count_unscored()
                raise deadline.exceeded(f"reward server {self._config.remote_url}") from error
            except _Transient:
                self._count_unscored()
                raise
            except SampleRefused:
                self._record_response()
                raise
        self._record_response()
        return self._reward(answer)

    def inject_outage(self, seconds: float) -> None:
        """Inject a fault: the server is unreachable for ``seconds``."""
        self._outages.append(Outage(seconds))

    def take_recoveries(self) -> tuple[Recovery, ...]:
        """Return a record of each injected outage during which a request failed.

        Each call returns an outage's record, up to the first call after the server has responded again. That call forgets the
        outage and releases its port. An outage that ended without a failed request is forgotten too.
        """
        recoveries = tuple(recovery for outage in self._outages for recovery in outage.recoveries())
        for outage in self._outages:
            if outage.is_over:
                outage.release()
        self._outages = [outage for outage in self._outages if not outage.is_over]
        return recoveries

    async def close(self) -> None:
        """Close the connections, and release the ports of injected outages."""
        for outage in self._outages:
            outage.release()
        if self._session is not None:
            await self._session.close()

    def _count_unscored(self) -> None:
        """Mark the server as down. If the last injected outage is still active, count one more sample without a score."""
        self._down = True
        for outage in self._outages[-1:]:
            outage.num_unscored += outage.is_active

    def _record_response(self) -> None:
        self._down = False
        for outage in self._outages:
            outage.record_answer()

    def _count(self, state: RetryCallState) -> None:
        del state
        self.num_retries += 1

    async def _post(self, body: dict[str, Any]) -> bytes:
        url = cast(str, self._config.remote_url)
        outage = self._outages[-1] if self._outages and self._outages[-1].is_active else None
        address = url if outage is None else outage.address(url)
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(address, json=body, headers=HEADERS, allow_redirects=False) as response:
                content = await _read(response.content)
        except (aiohttp.ClientError, OSError) as error:
            if outage is not None:
                outage.record_failure(error)
            raise _Transient(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            if len(content) > MAX_ANSWER_BYTES:
                raise RewardError(f"reward.remote_url={url} returned more than {MAX_ANSWER_BYTES} bytes; {EXPECTED}")
            return content
        reply = f"HTTP {response.status}: {content[:200].decode(errors='replace').strip() or response.reason}"
        if response.status in WRONG_ADDRESS:
            raise RewardError(
                f"reward.remote_url={url} returned {reply}; set it to the address that accepts POST requests"
            )
        raise (_Transient if response.status >= 500 or response.status in BUSY else SampleRefused)(reply)

    def _reward(self, content: bytes) -> Reward:
        try:
            reply: Any = json.loads(content)
            fields: dict[str, Any] = reply if isinstance(reply, dict) else {"score": reply}
            return validated_reward(fields["score"], fields.get("acc"))
        except (ValueError, KeyError, RecursionError) as error:
            raise RewardError(
                f"reward.remote_url={self._config.remote_url} returned {content[:200].decode(errors='replace')!r}: "
                f"{error}; {EXPECTED}"
            ) from error


async def _read(stream: aiohttp.StreamReader) -> bytes:
    """Read a response body and return it. Stop reading once more than ``MAX_ANSWER_BYTES`` bytes have arrived."""
    content = bytearray()
    async for piece in stream.iter_any():
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            break
    return bytes(content)
