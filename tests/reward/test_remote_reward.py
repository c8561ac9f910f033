"""Reward server: a real one on loopback that answers, fails, is late or is down."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable

import pytest

from slime_like.config.schema.rollout import RewardConfig
from slime_like.data.faults import REWARD_SERVER, InjectedFault, outcomes
from slime_like.errors import RewardError
from slime_like.metrics.types import reduce_metrics
from slime_like.reward import remote
from slime_like.reward.outage import Outage
from slime_like.reward.pool import RewardPool
from slime_like.types import Reward, Status
from slime_like.util.ports import PortLease
from tests.reward.reward_server import Script, serve
from tests.reward.scored import group, scores
from tests.reward.test_reward_pool import counts


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE_S", 0.0)


def config(url: str, **changes: object) -> RewardConfig:
    return RewardConfig(name="remote_rm", remote_url=url, **({"remote_retries": 2, "timeout_s": 20.0} | changes))  # pyright: ignore[reportArgumentType]


def with_server(script: Script, test: Callable[[str, list[dict[str, object]]], Awaitable[None]]) -> None:
    """Run ``test(url, requests)`` with a running server."""

    async def run() -> None:
        async with serve(script) as (url, requests):
            await test(url, requests)

    asyncio.run(run())


async def score(pool: RewardPool, *texts: str, rm_type: str | None = None) -> list[Reward | None]:
    scored_group = (await pool.score([group(*texts, rm_type=rm_type)]))[0]
    return [sample.reward for sample in scored_group.samples]


def test_the_server_gets_slimes_request_and_answers_number_or_object() -> None:
    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url))
        assert await score(pool, "number", "object") == [Reward(0.5), Reward(-1.0, 0.0)]
        assert requests[0] == {"prompt": "2+2=", "response": "number", "label": "4"}
        assert await score(pool, r"x \boxed{number}", rm_type="boxed_remote_rm") == [Reward(0.5)]
        assert reduce_metrics(pool.metrics()) == counts(calls=3)
        await pool.stop()

    with_server(
        lambda body, _: (200, "0.5" if body["response"] == "number" else '{"score": -1, "acc": 0, "x": []}'), test
    )


def test_an_intermittent_failure_is_retried() -> None:
    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url))
        assert await score(pool, "a") == [Reward(1.0)]
        assert len(requests) == 3
        assert reduce_metrics(pool.metrics()) == counts(calls=1, remote_retries=2)
        assert pool.warnings() == ()
        await pool.stop()

    with_server(
        lambda _, num_requests: (200, "1") if num_requests == 2 else ((503, "busy"), (429, "slow"))[num_requests], test
    )


@pytest.mark.parametrize(("fallback", "status"), [(0.25, Status.COMPLETED), (None, Status.FAILED)])
def test_a_dead_server_gives_one_message_and_the_configured_value(fallback: float | None, status: Status) -> None:
    async def run(port: int) -> None:
        pool = RewardPool(config(f"http://127.0.0.1:{port}/score", fallback=fallback, remote_concurrency=1))
        scored_group = (await pool.score([group(*"abcdefgh")]))[0]
        assert scores(scored_group) == [fallback or 0.0] * 8
        assert {sample.status for sample in scored_group.samples} == {status}
        # The first sample is retried; the others then take one request each.
        assert reduce_metrics(pool.metrics()) == counts(calls=8, remote_failures=8, fallbacks=8, remote_retries=2)
        (message,) = pool.warnings()
        for part in (f"http://127.0.0.1:{port}/score", "Cannot connect", "reward.remote_retries=2", "reward.fallback"):
            assert part in message
        async with serve(lambda *_: (200, "1"), port):
            assert await score(pool, "a", "b") == [Reward(1.0), Reward(1.0)]
        assert pool.warnings() == (f"the reward server http://127.0.0.1:{port}/score responds again",)
        await pool.stop()

    with PortLease("127.0.0.1") as port:
        asyncio.run(run(port))


def test_a_timeout_counts_as_configured() -> None:
    async def run() -> None:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = RewardPool(config(f"http://127.0.0.1:{port}", timeout_s=0.05, fallback=-1.0))
        assert await score(pool, "a") == [Reward(-1.0)]
        assert reduce_metrics(pool.metrics()) == counts(calls=1, remote_failures=1, fallbacks=1)
        (message,) = pool.warnings()
        assert re.search(rf"reward pool waited \d+ s for reward server http://127\.0\.0\.1:{port}", message), message
        await pool.stop()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("fallback", [0.25, None])
def test_an_injected_outage_looks_like_a_server_that_is_down(
    fallback: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request arrives during the outage. Only the first sample is retried, and the outage's cost is reported."""
    lasts = [True]
    monkeypatch.setattr(Outage, "is_active", property(lambda _: lasts[0]))

    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url, fallback=fallback, remote_concurrency=1))
        pool.block_server(5.0)
        assert pool.take_recoveries() == (), "no request was made yet"
        scored_group = (await pool.score([group(*"abc")]))[0]
        assert (scores(scored_group), requests) == ([fallback or 0.0] * 3, [])
        assert reduce_metrics(pool.metrics()) == counts(calls=3, remote_failures=3, fallbacks=3, remote_retries=2)
        (message,) = pool.warnings()
        assert f"the reward server {url} does not score (ClientConnectorError" in message
        (outage,) = pool.take_recoveries()
        assert (outage.engine, outage.groups, outage.joined) == (REWARD_SERVER, 3, 0.0)
        assert "Cannot connect to host 127.0.0.1" in outage.cause
        lasts[0] = False
        assert await score(pool, "d") == [Reward(1.0)]
        (recovery,) = pool.take_recoveries()
        assert recovery.key == outage.key and recovery.joined >= recovery.noticed > 0
        assert pool.take_recoveries() == ()
        injection = InjectedFault("reward_down:collect:0:0", REWARD_SERVER, recovery.noticed - 1)
        (outcome,) = outcomes([injection], [recovery])
        assert outcome.result.startswith("noticed after 1.0 s (down: Cannot connect to host")
        assert re.search(r"answers again after \d\.\d s, 3 samples without its score", outcome.result)
        assert "has not answered since" in outcomes([injection], [outage])[0].result
        assert outcomes([injection], [])[0].result.startswith("no request failed")
        await pool.stop()

    with_server(lambda *_: (200, "1"), test)


def test_retries_outlast_a_short_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    lasts = itertools.chain([True] * 2, itertools.repeat(False))
    monkeypatch.setattr(Outage, "is_active", property(lambda _: next(lasts)))

    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url, remote_retries=9))
        pool.block_server(5.0)
        assert await score(pool, "a") == [Reward(1.0)]
        assert reduce_metrics(pool.metrics()) == counts(calls=1, remote_retries=2)
        (recovery,) = pool.take_recoveries()
        assert recovery.groups == 0 and recovery.joined
        await pool.stop()

    with_server(lambda *_: (200, "1"), test)


def test_a_failure_after_an_outage_is_not_attributed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outage, "is_active", property(lambda _: False))

    async def run(port: int) -> None:
        pool = RewardPool(config(f"http://127.0.0.1:{port}", fallback=0.25, remote_retries=0))
        pool.block_server(5.0)
        assert await score(pool, "a") == [Reward(0.25)]
        assert pool.take_recoveries() == ()
        await pool.stop()

    with PortLease("127.0.0.1") as port:
        asyncio.run(run(port))


def test_a_server_that_refuses_samples_is_not_down() -> None:
    """The first refusal is reported once, and a refusal ends an outage."""

    def script(body: dict[str, object], num_requests: int) -> tuple[int, str]:
        return (503, "busy") if num_requests == 0 else (422, "too odd") if body["response"] == "bad" else (200, "1")

    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url, fallback=-1.0, remote_concurrency=1, remote_retries=0))
        assert await score(pool, "good", "bad", "good", "bad") == [Reward(value) for value in (-1.0, -1.0, 1.0, -1.0)]
        down, up, refused = pool.warnings()
        assert "does not score (HTTP 503: busy)" in down and up.endswith("responds again")
        assert refused == (
            f"the reward server {url} refused sample 1 of prompt 7 (train) with HTTP 422: too odd: refused samples count as -1 "
            "(reward.fallback); reward/remote_failures counts them"
        )
        assert reduce_metrics(pool.metrics()) == counts(calls=4, remote_failures=3, fallbacks=3)
        await pool.stop()

    with_server(script, test)


@pytest.mark.parametrize("status", [200, 422])
def test_a_response_after_an_outage_restores_the_retries(status: int) -> None:
    responses = [(503, "busy"), (status, "1"), (503, "busy"), (200, "1")]

    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url, fallback=-1.0, remote_concurrency=1, remote_retries=1))
        pool._remote._down = True  # pyright: ignore[reportPrivateUsage]
        assert await score(pool, "a", "b", "c") == [Reward(-1.0), Reward(1.0 if status == 200 else -1.0), Reward(1.0)]
        assert len(requests) == 4, "the third sample was sent twice"
        await pool.stop()

    with_server(lambda _, num_requests: responses[num_requests], test)


def test_a_refused_sample_is_not_sent_twice() -> None:
    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url, fallback=-1.0, remote_concurrency=1))
        assert await score(pool, "bad", "good") == [Reward(-1.0), Reward(1.0)]
        assert len(requests) == 2
        assert reduce_metrics(pool.metrics()) == counts(calls=2, remote_failures=1, fallbacks=1)
        assert "HTTP 422: too odd" in pool.warnings()[0]
        await pool.stop()

    with_server(lambda body, _: (422, "too odd") if body["response"] == "bad" else (200, "1"), test)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            200,
            '"good"',
            r"returned '\"good\"': 'good' \(str\), not a number; a reward server must return a finite number, or an object",
        ),
        (200, "NaN", r"returned 'NaN'"),
        (200, f"1{'0' * 400}", r"returned '10+': inf, not a finite number"),
        (200, "1e300", r"1e\+300, not a number from -1e\+09 to 1e\+09"),
        (200, '{"score": 1, "acc": 7}', r"accuracy 7, not a number from 0 to 1"),
        (200, "[" * 2**21, r"returned more than 1048576 bytes"),
        (401, "x" * 2**21, r"returned HTTP 401: x{200}; set"),
        (200, "null", r"returned 'null'"),
        (200, '{"reward": 1}', r"returned .+ such as \{\"score\": 0.5, \"acc\": 1\}"),
        (200, "<html>", r"returned '<html>'"),
        (401, "who are you", r"remote_url=http://.+/score returned HTTP 401: who are you; set it to the address"),
    ],
)
def test_an_invalid_answer_ends_the_run_naming_the_key(status: int, body: str, message: str) -> None:
    async def test(url: str, requests: list[dict[str, object]]) -> None:
        pool = RewardPool(config(url))
        with pytest.raises(RewardError, match=message):
            await score(pool, "a")
        await pool.stop()

    with_server(lambda *_: (status, body), test)
