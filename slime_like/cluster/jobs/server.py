"""HTTP client of a Ray cluster's job server, the dashboard on the head node.

Every request has a deadline. The connection to a job's log lasts until the job ends; only its start has a deadline. Ray's
own client has no deadlines, lets RAY_ADDRESS override its argument, and imports a module that the address names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp

from slime_like.cluster.jobs.address import ADDRESS_VARIABLE, TOKEN_VARIABLE, ServerAddress
from slime_like.cluster.jobs.job import ClusterJob, read_job
from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes
from slime_like.errors import ConfigError, DataError, ProcessLost, WorkerError
from slime_like.util.deadline import Deadline
from slime_like.util.reading import typed

REQUEST_S = 60.0
HEARTBEAT_S = 20.0  # between pings on the connection that streams a log
TOKEN_MODE = "token"
VERSION = "/api/version"
MAX_REPLY_CHARS = 400


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A job to submit."""

    submission_id: str
    entrypoint: str
    metadata: Mapping[str, str]
    runtime_env: Mapping[str, Any] = field(default_factory=dict[str, Any])


class JobServer:
    """Async client of one job server, to be used as an async context manager.

    Its methods except ``check`` and ``log`` raise ``ConfigError`` if the server rejects the token, ``DataError`` if the job is
    unknown, ``ProcessLost`` if the connection fails or the reply is not valid JSON, ``WorkerError`` if the server returns
    another error status or JSON of another form, and ``DeadlineExceeded`` after ``REQUEST_S``.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {} if self.address.token is None else {"Authorization": f"Bearer {self.address.token}"}
        self._session = aiohttp.ClientSession(headers=headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def check(self) -> None:
        """Check that a Ray job server responds at the address.

        Raises ``ConfigError`` if the connection fails, another server responds, or the token is rejected; ``WorkerError`` if
        the reply is 5xx; and ``DeadlineExceeded`` after ``REQUEST_S``.
        """
        try:
            reply = await self._request("GET", VERSION)
        except ProcessLost as error:
            raise ConfigError(
                f"no job server answers ({error}): start the cluster's head with a dashboard "
                f"(`ray start --head --dashboard-host=...`), forward its port, or correct --address or {ADDRESS_VARIABLE}"
            ) from error
        if not isinstance(reply, dict) or "ray_version" not in reply:
            raise self._no_job_server()

    async def requires_token(self) -> bool:
        """Return whether the cluster requires a token."""
        reply = await self._read("/api/authentication_mode", dict[str, Any])
        return reply.get("authentication_mode") == TOKEN_MODE

    async def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the live nodes with the resources that they report.

        Raises ``WorkerError`` if the reply is malformed.
        """
        reply = await self._request("GET", "/api/v0/nodes?detail=true&limit=10000")
        try:
            entries = reply["data"]["result"]["result"]
            return cluster_nodes(
                [
                    {
                        "Alive": entry["state"] == "ALIVE",
                        "NodeManagerAddress": entry["node_ip"],
                        "Resources": entry["resources_total"],
                        "NodeID": entry["node_id"],
                    }
                    for entry in entries
                ]
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"{self.address.url} sent a list of nodes that cannot be read ({error!r})") from error

    async def upload(self, name: str, content: bytes) -> str:
        """Upload a package unless the cluster has it; return its URI. ``name`` contains the content's hash."""
        path = f"/api/packages/gcs/{name}"
        if await self._status("GET", path, None) != 200:
            await self._request("PUT", path, data=content)
        return f"gcs://{name}"

    async def submit(self, request: JobRequest) -> None:
        """Submit a job."""
        await self._request("POST", "/api/jobs/", json={key: value for key, value in asdict(request).items() if value})

    async def jobs(self) -> tuple[ClusterJob, ...]:
        """Return the cluster's jobs, oldest first."""
        reply = await self._read("/api/jobs/", list[Any])
        jobs = [job for entry in reply if (job := read_job(entry)) is not None]
        return tuple(sorted(jobs, key=lambda job: job.started_at or float("inf")))

    async def job(self, job_id: str) -> ClusterJob:
        """Return one job.

        Raises ``DataError`` if the server has no such job, or if the id is that of a driver that was not submitted as a job.
        """
        job = read_job(await self._request("GET", f"/api/jobs/{_valid_id(job_id)}"))
        if job is None:
            raise DataError(f"{job_id} at {self.address.url} is a driver that was not submitted as a job")
        return job

    async def stop(self, job_id: str) -> None:
        """Ask Ray to send SIGTERM and, if the job outlives ``RAY_JOB_STOP_WAIT_TIME_S`` (set by ``job_request``), SIGKILL."""
        await self._request("POST", f"/api/jobs/{_valid_id(job_id)}/stop")

    async def remove(self, job_id: str) -> None:
        """Remove an ended job from the server's list."""
        await self._request("DELETE", f"/api/jobs/{_valid_id(job_id)}")

    async def output(self, job_id: str) -> str:
        """Return the output that a job has written so far."""
        reply = await self._read(f"/api/jobs/{_valid_id(job_id)}/logs", dict[str, Any])
        return str(reply.get("logs", ""))

    async def log(self, job_id: str) -> AsyncGenerator[str]:
        """Yield the job's output from its beginning, as it appears.

        Raises ``ProcessLost`` if the server refuses the request (for example for an unknown job), if it does not answer
        within ``REQUEST_S``, or if the connection breaks before the job ends. Raises ``DataError`` if ``job_id`` cannot be
        the id of a job.
        """
        path = f"/api/jobs/{_valid_id(job_id)}/logs/tail"
        try:
            async with await self._connect(path) as socket:
                async for message in socket:
                    if message.type == aiohttp.WSMsgType.TEXT:
                        yield message.data
                if socket.close_code != aiohttp.WSCloseCode.OK:
                    raise ProcessLost(f"the log of {job_id} ended early (close code {socket.close_code})")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ProcessLost(f"the log of {job_id} cannot be read ({error or type(error).__name__})") from error

    def _no_job_server(self, answer: str = "") -> ConfigError:
        return ConfigError(
            f"{self.address.url} is not a Ray cluster's job server{answer}: correct --address or {ADDRESS_VARIABLE}"
        )

    async def _read[T](self, path: str, kind: type[T]) -> T:
        """Return the JSON reply of ``path``, a ``dict[str, Any]`` or ``list[Any]``.

        Raises ``WorkerError`` if it is another JSON value.
        """
        reply = await self._request("GET", path)
        try:
            return typed(reply, kind)
        except ValueError as error:
            raise WorkerError(f"{self.address.url}{path}: the reply cannot be read ({error})") from error

    async def _request(self, method: str, path: str, **body: Any) -> Any:
        status, text, reply = await self._exchange(method, path, **body)
        if status in (401, 403):
            raise ConfigError(
                f"{self.address.url} refuses the token ({status}): set {TOKEN_VARIABLE} to the cluster's token "
                "(the same on every node)"
            )
        if status == 404 and path.startswith("/api/jobs/"):
            raise DataError(f"{self.address.url}{path}: no such job: `scripts/submit.py list` lists them")
        if status != 200:
            answer = f"{self.address.url}{path} answered {status}: {text.strip()[-MAX_REPLY_CHARS:]}"
            if path == VERSION and status < 500:  # a job server has this path, but may fail with 5xx
                raise self._no_job_server(f" ({answer})")
            raise WorkerError(answer)
        return reply

    async def _status(self, method: str, path: str, data: bytes | None) -> int:
        return (await self._exchange(method, path, data=data))[0]

    async def _exchange(self, method: str, path: str, **body: Any) -> tuple[int, str, Any]:
        """Send a request; return status, text and JSON of the reply. The JSON is an empty mapping if the reply has none.

        Raises ``DeadlineExceeded`` after ``REQUEST_S``, ``ProcessLost`` if the connection fails or the JSON is
        malformed.
        """
        deadline = Deadline("scripts/submit.py", "job server", REQUEST_S)
        timeout = aiohttp.ClientTimeout(total=deadline.limit)
        try:
            async with self._http().request(method, self.address.url + path, timeout=timeout, **body) as response:
                text = (await response.read()).decode(errors="replace")
                reply = await response.json() if response.content_type == "application/json" else {}
                return response.status, text, reply
        except TimeoutError as error:
            raise deadline.exceeded(f"{self.address.url}{path}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProcessLost(f"{self.address.url}{path}: {error or type(error).__name__}") from error

    async def _connect(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """Open a websocket. Raises ``DeadlineExceeded`` after ``REQUEST_S``, and an aiohttp error if it cannot be opened."""
        deadline = Deadline("scripts/submit.py", "job server", REQUEST_S)
        try:
            async with asyncio.timeout(deadline.limit):
                return await self._http().ws_connect(self.address.url + path, heartbeat=HEARTBEAT_S)
        except TimeoutError as error:
            raise deadline.exceeded(f"{self.address.url}{path}") from error

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use JobServer as an async context manager")
        return self._session


def _valid_id(job_id: str) -> str:
    """Return ``job_id``, which is safe in a URL.

    Raises ``DataError`` unless it consists of letters, digits, "-", "_" and ".", and not of dots alone.
    """
    if not job_id.strip(".") or not all(char.isalnum() or char in "-_." for char in job_id):
        raise DataError(f"{job_id!r} is not the id of a job: `scripts/submit.py list` lists them")
    return job_id
