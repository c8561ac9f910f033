"""Runs of agents: harmless faults, and those that end the run."""

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

NOBODY: Any = None  # an engine that is never asked
CONTEXT = GenerateContext(Sampling(1.0, 8), str, 0, 0, 64)


def prompt(dataset: str = "train") -> Prompt:
    return Prompt(0, np.array([5], np.int32), dataset, "label", None, dataset=dataset)


def play(
    agent: Callable[..., Any], *prompts: Prompt, n: int = 1, **how: Any
) -> tuple[list[Sample], dict[str, float], str]:
    """Samples, metrics and warnings of ``n`` runs for each prompt, all side by side."""
    generator = OpenAIAgent(
        RolloutConfig(generate="openai_agent", agent=f"tests.rollout.idle_agents:{agent.__name__}", **how)
    )

    async def whole() -> list[Sample]:
        try:
            calls = [generator(p, NOBODY, list(range(n)), CONTEXT) for p in prompts or [prompt()]]
            return [sample for samples in await asyncio.gather(*calls) for sample in samples]
        finally:
            await generator.close()

    samples = asyncio.run(whole())
    return samples, {metric.name: metric.value for metric in generator.metrics()}, " ".join(generator.warnings())


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (idle_agents.idle, "give its client the base_url and api_key"),
        (idle_agents.raises, "LookupError: lost"),
        (idle_agents.cancels, "CancelledError"),
        (idle_agents.leaves, r"RuntimeError: the agent ended its process: SystemExit(3)"),
        (idle_agents.leaves_in_a_task, r"RuntimeError: the agent ended its process: SystemExit(3)"),
    ],
)
def test_it_fails_its_sample_and_leaves_the_others_running(agent: Callable[..., Any], why: str) -> None:
    samples, metrics, warnings = play(agent, n=2, agent_deadline_s=30.0)
    assert [sample.status for sample in samples] == [Status.FAILED] * 2
    assert (metrics["agent/failures"], metrics["agent/timeouts"]) == (2, 0)
    assert why in warnings


def test_failures_end_the_run_once_those_begun_beside_them_had_their_turn() -> None:
    with pytest.raises(AgentError, match=r"^10 runs of an agent failed one after another; the last: .*LookupError"):
        play(idle_agents.raises, n=20)


def test_an_evaluation_does_not_wait_for_the_places_of_training() -> None:
    idle_agents.finished[:] = [asyncio.Event()]
    _, metrics, _ = play(
        idle_agents.takes_turns, prompt("train"), prompt("eval"), agent_concurrency=1, agent_deadline_s=10.0
    )
    assert metrics["agent/timeouts"] == 0


def test_an_agent_changes_what_is_its_own() -> None:
    content, tools = ["hi"], ["add"]
    row = Prompt(
        0, np.array([5], np.int32), "", "5", None, {"label": "other", "tools": tools}, "t", ({"content": content},)
    )
    play(idle_agents.writes, row)
    assert (idle_agents.heard.pop(), content, tools) == ("5", ["hi"], ["add"])


def test_a_limit_does_not_count_the_time_for_which_calls_are_held_back() -> None:
    async def scenario() -> str:
        loop, answer, held = AgentLoop(1), Future[str](), iter([0.0, 100.0])

        async def work() -> str:
            return await asyncio.wrap_future(answer)

        def paused_s() -> float:
            seconds = next(held)
            if seconds:  # the limit has passed
                answer.set_result("done")
            return seconds

        found = await loop.run(work(), 0.0, paused_s)
        with pytest.raises(AgentTimeout):
            await loop.run(asyncio.Event().wait(), 0.0, lambda: 0.0)
        await asyncio.to_thread(loop.close)
        return found

    assert asyncio.run(scenario()) == "done"


class Busy(Session):
    """Its engine is never done."""

    begun: asyncio.Event
    cut = False

    async def answer(self, request: ChatRequest) -> AgentReply:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cut = True
            raise
        raise AssertionError


def test_calls_end_with_their_key_and_bodies_have_a_bound() -> None:
    async def scenario() -> tuple[int, str, int, bool]:
        session = Busy(NOBODY, CONTEXT, Renderer(NOBODY, {}), index=0, seed=0)
        session.begun = asyncio.Event()
        endpoint = Endpoint()
        await endpoint.open()
        key = endpoint.admit(session)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:

            async def ask(content: str) -> tuple[int, Any]:
                asked = {"messages": [{"role": "user", "content": content}]}
                async with client.post(f"{endpoint.base_url}/chat/completions", json=asked) as reply:
                    return reply.status, await reply.json()

            status, found = await ask("x" * 70_000)
            call = asyncio.create_task(ask("x" * 60_000))
            await asyncio.wait_for(session.begun.wait(), 10)
            endpoint.dismiss(key)
            refused, _ = await asyncio.wait_for(call, 10)
        await endpoint.close()
        return status, found["error"]["message"], refused, session.cut

    status, message, refused, cut = asyncio.run(scenario())
    assert (status, refused, cut) == (413, 401, True)
    assert "more than 65536 bytes" in message
