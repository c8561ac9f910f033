"""Follow a job: copy its log as it appears until the job ends, and reconnect if the connection is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from slime_like.cluster.jobs.job import ClusterJob
from slime_like.cluster.jobs.server import JobServer
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.errors import DeadlineExceeded, ProcessLost, WorkerError
from slime_like.util.counted import counted
from slime_like.util.deadline import Deadline

POLL_S = 0.5
RETRY_S = 2.0
LOST_S = 180.0  # without an answer from the job server, before giving up
MAX_READS = 5  # attempts to read the rest of the log of a job that has ended
REST_S = 600.0  # limit of these attempts together


async def follow(server: JobServer, job_id: str, write: Callable[[str], None]) -> ClusterJob:
    """Write the job's log from its beginning until the job ends; return the ended job.

    After a lost connection, read the log again and skip the part that was already written. Once the job has ended, do so at
    most ``MAX_READS`` times and for at most ``REST_S``; if that fails, write the reason in place of the rest of the log.
    Raises ``DeadlineExceeded`` if the server does not answer for ``LOST_S``, and otherwise raises like ``JobServer.job``; the
    job itself is not affected.
    """
    num_written, num_reads = 0, 0
    rest_deadline: Deadline | None = None  # of a job that ended while the connection was lost
    while True:
        position, problem = 0, ""
        try:
            limit_s = None if rest_deadline is None else rest_deadline.limit - rest_deadline.elapsed()
            async with asyncio.timeout(limit_s), aclosing(server.log(job_id)) as chunks:
                async for chunk in chunks:
                    new = chunk[max(0, num_written - position) :]
                    position += len(chunk)
                    num_written = max(num_written, position)
                    if new:
                        write(new)
        except TimeoutError:
            assert rest_deadline is not None
            problem = str(rest_deadline.exceeded(f"the log of {job_id}"))
        except ProcessLost as error:
            problem = str(error)
            await asyncio.sleep(RETRY_S)
        job = await _patient(lambda: server.job(job_id), f"the job server at {server.address.url}")
        is_late = rest_deadline is not None and rest_deadline.elapsed() >= rest_deadline.limit
        if job.has_ended and (not problem or is_late or num_reads == MAX_READS):
            if problem:
                write(f"\nthe rest of the output is missing: {problem}\n")
            return job
        if job.has_ended:
            num_reads += 1
            rest_deadline = rest_deadline or Deadline("scripts/submit.py", "rest of the log", REST_S)
        await asyncio.sleep(POLL_S)


async def wait_for_end(server: JobServer, job_id: str, deadline: Deadline) -> ClusterJob:
    """Wait for the job to end and return it.

    Raises ``DeadlineExceeded`` after ``deadline``, or if the server does not answer for ``LOST_S``, and otherwise raises
    like ``JobServer.job``.
    """
    while True:
        job = await _patient(lambda: server.job(job_id), f"the job server at {server.address.url}")
        if job.has_ended:
            return job
        await asyncio.sleep(min(POLL_S, deadline.remaining(f"job {job_id}")))


async def wait_for_nodes(server: JobServer, num_nodes: int, seconds: float) -> tuple[ClusterNode, ...]:
    """Wait until at least ``num_nodes`` nodes, and at least one, are live; return all live nodes.

    Raises ``DeadlineExceeded`` after ``seconds``, with the number of nodes that have joined (a request in progress at that
    time is not interrupted), and ``ConfigError`` if the server rejects the token. Other failed requests are repeated.
    """
    deadline, nodes = Deadline("scripts/submit.py", "nodes", seconds), ()
    while True:
        with suppress(ProcessLost, WorkerError, DeadlineExceeded):  # the head is starting
            nodes = await server.nodes()
        if nodes and len(nodes) >= num_nodes:
            return nodes
        waits_for = (
            f"{counted(num_nodes, 'node')} of the cluster at {server.address.url}, of which {len(nodes)} have joined"
        )
        await asyncio.sleep(min(RETRY_S, deadline.remaining(waits_for)))


async def _patient[T](call: Callable[[], Awaitable[T]], waits_for: str) -> T:
    """Return the result of ``call``; repeat the call as long as it raises ``ProcessLost`` or ``DeadlineExceeded``.

    Raises ``DeadlineExceeded`` if it still fails after ``LOST_S``. Other errors are raised at once.
    """
    deadline = Deadline("scripts/submit.py", "follow", LOST_S)
    while True:
        try:
            return await call()
        except (ProcessLost, DeadlineExceeded):
            await asyncio.sleep(min(RETRY_S, deadline.remaining(waits_for)))
