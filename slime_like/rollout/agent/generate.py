"""``rollout.generate=openai_agent``: a prompt is answered by an agent of the user's, whose model is the policy.

The agent is a coroutine function ``(base_url, api_key, prompt, metadata) -> reward | None`` that calls its model with any
client of OpenAI's chat completions. Whatever it asks is recorded with token ids and log-probabilities, and trained on.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from slime_like.config.rules.agents import agent_function
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import AgentError
from slime_like.interfaces import Engine, GenerateContext
from slime_like.metrics.types import Metric, Sum
from slime_like.reward.worker import to_reward
from slime_like.rollout.agent.endpoint import Endpoint
from slime_like.rollout.agent.loop import AgentLoop, TooLate
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.session import Session
from slime_like.rollout.collect.resumable import ResumableEngine
from slime_like.types import Prompt, Reward, Sample, Status
from slime_like.util.deadline import Deadline
from slime_like.util.together import being_cancelled, together

COUNTS = ("runs", "calls", "further_samples", "failures", "timeouts")
FIRST_IN_A_ROW, MOST_IN_A_ROW = 8, 32  # failures after which the run ends: before any agent ended well, and later


class OpenAIAgent:
    """Runs agents, each with a key of its own, and turns what they asked into samples.

    An agent that raises, that never asks its model or that takes longer than ``rollout.agent_deadline_s`` fails its sample,
    which is then neither trained on nor in any baseline: ``agent/failures`` and ``agent/timeouts`` count them, and one
    warning per rollout says why. Raises ``AgentError`` when the first ones all fail, or many in a row: that is no accident.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._path = config.agent or ""
        self._agent = agent_function(self._path)
        self._seconds = config.agent_deadline_s
        # Runs that wait for the next rollout keep their places: an evaluation in between must not wait for these.
        self._most, self._places = config.agent_concurrency, dict[str, asyncio.Semaphore]()
        self._endpoint, self._loop = Endpoint(), AgentLoop(2 * config.agent_concurrency)
        self._running = 0
        self._counts: Counter[str] = Counter()
        self._warnings: dict[str, str] = {}
        self._told: set[str] = set()
        self._well = False  # an agent has ended well
        self._failed_in_a_row = 0
        self._why = ""  # the last one failed

    async def __call__(
        self, prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
    ) -> Sequence[Sample]:
        """One run of the agent per seed, side by side."""
        await self._endpoint.open()
        renderer = Renderer(context.tokenizer, context.chat_template_kwargs)
        sessions = [Session(engine, context, renderer, index=i, seed=seed) for i, seed in enumerate(seeds)]
        found = await together([self._episode(prompt, session, engine) for session in sessions])
        return [sample for samples in found for sample in samples]

    def metrics(self) -> tuple[Metric, ...]:
        """``agent/*`` since the last call."""
        found = tuple(Sum(f"agent/{name}", float(self._counts[name])) for name in COUNTS)
        self._counts.clear()
        return found

    def warnings(self) -> tuple[str, ...]:
        """One of each kind since the last call."""
        found, self._warnings = tuple(self._warnings.values()), {}
        return found

    async def close(self) -> None:
        """Stop agents and endpoint."""
        await asyncio.to_thread(self._loop.close)  # an agent that blocks may wait for an answer of this very loop
        await self._endpoint.close()

    async def _episode(self, prompt: Prompt, session: Session, engine: Engine) -> list[Sample]:
        async with self._places.setdefault(prompt.dataset, asyncio.Semaphore(self._most)):
            key = self._endpoint.admit(session)
            self._running += 1
            try:
                reward, status = await self._run(prompt, session, key, engine)
            finally:
                self._running -= 1
                self._endpoint.dismiss(key)
        if session.failure is not None:
            raise session.failure
        self._count(session, failed=status is Status.FAILED)
        samples = session.samples(prompt, reward, status)
        self._counts["further_samples"] += len(samples) - 1
        return samples

    async def _run(
        self, prompt: Prompt, session: Session, key: str, engine: Engine
    ) -> tuple[Reward | None, Status | None]:
        """What the agent said of itself, and how it ended where that is not for its samples to say."""
        asked: Any = [deepcopy(dict(message)) for message in prompt.messages] or prompt.text
        metadata = {**deepcopy(dict(prompt.metadata)), "label": prompt.label}
        limit = Deadline("rollout", f"agent, prompt {prompt.prompt_id}", self._seconds).limit
        try:
            work = self._agent(self._endpoint.base_url, key, asked, metadata)
            value = await self._loop.run(
                work, limit, lambda: engine.held_s if isinstance(engine, ResumableEngine) else 0.0
            )
        except TooLate:
            return None, self._late(session)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            return None, self._failed(session, error)
        except Exception as error:  # noqa: BLE001  fault boundary: an agent is a program of the user's
            return None, self._failed(session, error)
        reward = self._reward(value)
        if not session.num_calls and session.ended is None:
            return None, self._idle()
        return reward, None

    def _reward(self, value: object) -> Reward | None:
        try:
            return None if value is None else to_reward(value)
        except ValueError as error:
            raise AgentError(f"rollout.agent={self._path} {error}; it must return a finite number or None") from error

    def _late(self, session: Session) -> Status:
        self._counts["timeouts"] += 1
        self._why = self._warnings["timeout"] = (
            f"rollout.agent={self._path}: a run took longer than rollout.agent_deadline_s={self._seconds:g} and was "
            f"cancelled, after {session.num_calls} calls"
        )
        return Status.FAILED

    def _failed(self, session: Session, error: BaseException) -> Status:
        if session.ended is not None:  # it was told so, and did not look for that
            return session.ended
        self._counts["failures"] += 1
        self._why = self._warnings["failure"] = f"rollout.agent={self._path} failed: {_where(error)}"
        return Status.FAILED

    def _idle(self) -> Status:
        self._counts["failures"] += 1
        self._why = self._warnings["failure"] = (
            f"rollout.agent={self._path} ended without a call that was answered: give its client the base_url and api_key "
            "it is called with"
        )
        return Status.FAILED

    def _count(self, session: Session, *, failed: bool) -> None:
        self._counts["runs"] += 1
        self._counts["calls"] += session.num_calls
        for name in session.overrides.keys() - self._told:
            self._told.add(name)
            what = session.overrides[name]
            self._warnings[name] = (
                f"rollout.agent={self._path} asked for {what}: the trainer learns from what rollout.temperature samples"
            )
        self._well |= not failed
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
        # Failures tend to end first: those begun beside them must have had their turn.
        if self._failed_in_a_row >= max(MOST_IN_A_ROW if self._well else FIRST_IN_A_ROW, self._running):
            raise AgentError(
                f"{self._failed_in_a_row} runs of an agent failed one after another; the last: {self._why}"
            )


def _where(error: BaseException) -> str:
    """An error and the line that raised it, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f", {last[0].filename}:{last[0].lineno} in {last[0].name}" if last else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{place}"
