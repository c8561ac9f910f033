"""Agent runs: faults that fail a sample, and faults that end the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
import numpy as np
import pytest

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import AgentError
from slime_like.interfaces import GenerateContext, Sampling
from slime_like.rollout.agent.endpoint import Endpoint
from slime_like.rollout.agent.generate import OpenAIAgent
from slime_like.rollout.agent.loop import AgentLoop, AgentTimeout
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.replies import AgentReply
from slime_like.rollout.agent.requests import ChatRequest
from slime_like.rollout.agent.session import Session
from slime_like.types import Prompt, Sample, Status
from tests.rollout import idle_agents

NO_ENGINE: Any = None  # never called
CONTEXT = GenerateContext(Sampling(1.0, 8), str, 0, 0, 64, NO_ENGINE)


def prompt(dataset: str = "train") -> Prompt:
    return Prompt(0, np.array([5], np.int32), dataset, "label", None, dataset=dataset)


def play(
    agent: Callable[..., Any], *prompts: Prompt, n: int = 1, **options: Any
) -> tuple[list[Sample], dict[str, float], str]:
    """Return samples, metrics and warnings of ``n`` concurrent agent runs for each prompt."""
    generator = OpenAIAgent(
        RolloutConfig(generate="openai_agent", agent=f"tests.rollout.idle_agents:{agent.__name__}", **options)
    )

    async def run_all() -> list[Sample]:
        try:
            calls = [generator(p, NO_ENGINE, list(range(n)), CONTEXT) for p in prompts or [prompt()]]
            return [sample for samples in await asyncio.gather(*calls) for sample in samples]
        finally:
            await generator.close()

    samples = asyncio.run(run_all())
    return samples, {metric.name: metric.value for metric in generator.metrics()}, " ".join(generator.warnings())


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (idle_agents.idle, "pass base_url and api_key, which it receives as arguments, to its client"),
        (idle_agents.raises, "LookupError: lost"),
        (idle_agents.cancels, "CancelledError"),
        (idle_agents.leaves, r"RuntimeError: the agent ended its process: SystemExit(3)"),
        (idle_agents.leaves_in_a_task, r"RuntimeError: the agent ended its process: SystemExit(3)"),
    ],
)
def test_a_failing_agent_fails_only_its_sample(agent: Callable[..., Any], words: str) -> None:
    samples, metrics, warnings = play(agent, n=2, agent_deadline_s=30.0)
    assert [sample.status for sample in samples] == [Status.FAILED] * 2
    assert (metrics["agent/failures"], metrics["agent/timeouts"]) == (2, 0)
    assert words in warnings


@pytest.mark.parametrize(
    ("end_status", "status", "expected"),
    [
        (None, None, Status.FAILED),
        (Status.TRUNCATED, None, Status.TRUNCATED),
        (Status.TRUNCATED, Status.FAILED, Status.FAILED),
    ],
)
def test_a_run_without_answers_has_the_status_of_its_refusal(
    end_status: Status | None, status: Status | None, expected: Status
) -> None:
    """The agent may handle the refusal of its first call, as of a prompt that fills the context, and end normally."""
    session = Session(NO_ENGINE, CONTEXT, Renderer(NO_ENGINE, {}), index=0, seed=0)
    session.end_status = end_status
    (sample,) = session.samples(prompt(), None, status)
    assert sample.status is expected


def test_ten_failures_in_a_row_end_the_run() -> None:
    with pytest.raises(AgentError, match=r"^10 runs of an agent failed one after another; the last: .*LookupError"):
        play(idle_agents.raises, n=20)


def test_an_evaluation_does_not_wait_for_training_slots() -> None:
    idle_agents.finished[:] = [asyncio.Event()]
    _, metrics, _ = play(
        idle_agents.takes_turns, prompt("train"), prompt("eval"), agent_concurrency=1, agent_deadline_s=10.0
    )
    assert metrics["agent/timeouts"] == 0


def test_an_agent_gets_copies_of_its_arguments() -> None:
    content, tools = ["hi"], ["add"]
    row = Prompt(
        0, np.array([5], np.int32), "", "5", None, {"label": "other", "tools": tools}, "t", ({"content": content},)
    )
    play(idle_agents.writes, row)
    assert (idle_agents.labels.pop(), content, tools) == ("5", ["hi"], ["add"])


def test_a_deadline_excludes_paused_time() -> None:
    async def scenario() -> str:
        loop, answer, pauses = AgentLoop(1), Future[str](), iter([0.0, 100.0])

        async def work() -> str:
            return await asyncio.wrap_future(answer)

        def paused_s() -> float:
            seconds = next(pauses)
            if seconds:  # the deadline has passed
                answer.set_result("done")
            return seconds

        result = await loop.run(work(), 0.0, paused_s)
        with pytest.raises(AgentTimeout):
            await loop.run(asyncio.Event().wait(), 0.0, lambda: 0.0)
        await asyncio.to_thread(loop.close)
        return result

    assert asyncio.run(scenario()) == "done"


class Busy(Session):
    """Session whose engine never answers."""

    started: asyncio.Event
    cut = False

    async def answer(self, request: ChatRequest) -> AgentReply:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cut = True
            raise
        raise AssertionError


def test_revoking_a_key_ends_its_calls_and_bodies_are_limited() -> None:
    async def scenario() -> tuple[int, str, int, bool]:
        session = Busy(NO_ENGINE, CONTEXT, Renderer(NO_ENGINE, {}), index=0, seed=0)
        session.started = asyncio.Event()
        endpoint = Endpoint()
        await endpoint.open()
        key = endpoint.open_session(session)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:

            async def ask(content: str) -> tuple[int, Any]:
                request = {"messages": [{"role": "user", "content": content}]}
                async with client.post(f"{endpoint.base_url}/chat/completions", json=request) as reply:
                    return reply.status, await reply.json()

            status, answer = await ask("x" * 70_000)
            call = asyncio.create_task(ask("x" * 60_000))
            await asyncio.wait_for(session.started.wait(), 10)
            endpoint.close_session(key)
            second_status, _ = await asyncio.wait_for(call, 10)
        await endpoint.close()
        return status, answer["error"]["message"], second_status, session.cut

    status, message, second_status, cut = asyncio.run(scenario())
    assert (status, second_status, cut) == (413, 401, True)
    assert "more than 65536 bytes" in message
