"""Following of jobs and waiting for nodes, against a job server in the test's process with configurable faults."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from slime_like.cluster.jobs import follow as following
from slime_like.cluster.jobs import server as jobs_server
from slime_like.cluster.jobs.address import ServerAddress
from slime_like.cluster.jobs.follow import follow, wait_for_nodes
from slime_like.cluster.jobs.job import ClusterJob
from slime_like.cluster.jobs.server import JobServer
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.errors import DeadlineExceeded, ProcessLost
from tests.cluster.job_server import ServerState, job_server

LOG = "".join(f"[{step}/9] reward 0.{step}\n" for step in range(9))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0.01)
    monkeypatch.setattr(following, "POLL_S", 0.01)


def followed(state: ServerState, write: Callable[[str], None]) -> ClusterJob:
    """Follow job a of ``state`` and return it."""

    async def run() -> ClusterJob:
        async with asyncio.timeout(20), job_server(state) as server:
            return await follow(server, "a", write)

    return asyncio.run(run())


@pytest.mark.parametrize("breaks", [[], [1], [40, 20, 77, 0]])
def test_a_log_is_written_once_through_lost_connections(breaks: list[int]) -> None:
    state = ServerState(logs={"a": LOG}, breaks=breaks)
    state.add("a", "RUNNING")
    log: list[str] = []
    assert followed(state, log.append).code == 0
    assert "".join(log) == LOG


@pytest.mark.parametrize("breaks", [[40], [40, 20, 77, 0]])
def test_the_end_of_a_log_is_written_if_the_job_ends_while_the_connection_is_lost(breaks: list[int]) -> None:
    state = ServerState(logs={"a": LOG}, breaks=breaks, ends_at_break=True)
    state.add("a", "RUNNING")
    log: list[str] = []
    assert followed(state, log.append).code == 1
    assert "".join(log) == LOG


def test_a_log_of_an_ended_job_that_stays_unreadable_is_given_up() -> None:
    state = ServerState(logs={"a": LOG}, breaks=[40] * 100, ends_at_break=True)
    state.add("a", "RUNNING")
    log: list[str] = []
    assert followed(state, log.append).code == 1
    assert "".join(log).startswith(f"{LOG[:40]}\nthe rest of the output is missing: the log of a ")
    assert 100 - len(state.breaks) == 1 + following.MAX_READS


def test_a_log_of_an_ended_job_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0
    read_log = JobServer.log

    async def log(server: JobServer, job_id: str) -> AsyncGenerator[str]:
        nonlocal num_reads
        num_reads += 1
        async with aclosing(read_log(server, job_id)) as chunks:
            async for chunk in chunks:
                yield chunk
        await asyncio.Event().wait()

    monkeypatch.setattr(JobServer, "log", log)
    monkeypatch.setattr(following, "REST_S", 0.1)
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    state = ServerState(logs={"a": LOG}, breaks=[40], ends_at_break=True)
    state.add("a", "RUNNING")
    written: list[str] = []
    assert followed(state, written.append).code == 1
    reason = r"scripts/submit.py waited \d s for the log of a in phase 'rest of the log'"
    assert re.search(f"\nthe rest of the output is missing: {reason}", "".join(written)) and num_reads == 2


def test_a_server_that_does_not_start_to_send_a_log_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_server, "REQUEST_S", 0.1)
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")

    async def run() -> None:
        async with asyncio.timeout(20), JobServer(ServerAddress(url)) as server:
            await anext(server.log("a"))

    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts no connection
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ProcessLost, match=rf"the log of a cannot be read \(scripts/submit.py waited \d s for {url}"
        ):
            asyncio.run(run())


def test_a_server_that_is_gone_ends_the_wait_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOST_S", 0.2)
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")

    async def run() -> None:
        async with JobServer(ServerAddress("http://127.0.0.1:9")) as server:
            await follow(server, "a", print)

    with pytest.raises(DeadlineExceeded, match=r"waited 0 s for the job server at http://127.0.0.1:9"):
        asyncio.run(run())


def test_a_request_that_hangs_does_not_end_the_wait_for_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ClusterNode("10.0.0.1", 8, 8, 32 * 2**30)
    replies: list[Exception | ClusterNode] = [DeadlineExceeded("no reply in 60 s"), ProcessLost("refused"), node]

    async def nodes(_: JobServer) -> tuple[ClusterNode, ...]:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return (reply,)

    monkeypatch.setattr(JobServer, "nodes", nodes)
    server = JobServer(ServerAddress("http://127.0.0.1:9"))
    assert asyncio.run(wait_for_nodes(server, 1, 600.0)) == (node,)


def test_the_wait_for_nodes_ends_at_its_own_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")

    async def nodes(_: JobServer) -> tuple[ClusterNode, ...]:
        raise DeadlineExceeded("no reply in 60 s")

    monkeypatch.setattr(JobServer, "nodes", nodes)
    server = JobServer(ServerAddress("http://127.0.0.1:9"))
    with pytest.raises(
        DeadlineExceeded, match=r"for 2 nodes of the cluster at http://127.0.0.1:9, of which 0 have joined"
    ):
        asyncio.run(wait_for_nodes(server, 2, 0.1))
