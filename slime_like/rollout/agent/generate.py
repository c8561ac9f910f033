"""``rollout.generate=openai_agent``: a user-supplied agent, with the policy as its model, answers each prompt.

The agent is a coroutine function ``(base_url, api_key, prompt, metadata) -> reward | None`` that calls its model with
any client of OpenAI's chat completions. All its calls are recorded with token ids and log-probabilities. They are
trained on unless the agent fails.
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
from slime_like.rollout.agent.loop import AgentLoop, AgentTimeout
from slime_like.rollout.agent.render import Renderer
from slime_like.rollout.agent.session import Session
from slime_like.rollout.collect.sampler import ResumableEngine
from slime_like.types import Prompt, Reward, Sample, Status
from slime_like.util.concurrency import gather_or_cancel, is_task_cancelled
from slime_like.util.counted import counted
from slime_like.util.deadline import Deadline

COUNTS = ("runs", "calls", "further_samples", "failures", "timeouts")
MAX_FIRST_FAILURES, MAX_FAILURES = 8, 32  # consecutive failures that end the run: before the first success, and later


class OpenAIAgent:
    """Generate function that runs ``rollout.agent`` once per seed, with an API key per run, and converts the calls into samples.

    A run fails if the agent raises, receives no answer from its model, or exceeds ``rollout.agent_deadline_s``. If its last
    call was refused (the context was full, or the engine aborted), an error or a missing answer is not a failure. Samples of
    failed runs are not trained on and count in no baseline; ``agent/failures`` and ``agent/timeouts`` count the runs, and one
    warning of each kind per rollout names a cause. Calling an instance raises ``AgentError`` if an agent returns an invalid
    reward, the first runs all fail, or many runs fail in a row: this indicates a bug.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._path = config.agent or ""
        self._agent = agent_function(self._path)
        self._seconds = config.agent_deadline_s
        # One semaphore per dataset: agents of a paused rollout keep their slots, and an evaluation must not wait for them.
        self._concurrency, self._semaphores = config.agent_concurrency, dict[str, asyncio.Semaphore]()
        self._endpoint, self._loop = Endpoint(), AgentLoop(2 * config.agent_concurrency)
        self._num_running = 0
        self._counts: Counter[str] = Counter()
        self._warnings: dict[str, str] = {}
        self._warned_names: set[str] = set()
        self._has_succeeded = False  # at least one agent ended without failure
        self._num_consecutive_failures = 0
        self._last_failure = ""

    async def __call__(
        self, prompt: Prompt, engine: Engine, seeds: Sequence[int], context: GenerateContext
    ) -> Sequence[Sample]:
        """Run the agent once per seed; return the samples of all these runs.

        Concurrent calls for prompts of one dataset share a limit of ``rollout.agent_concurrency`` runs at a time.
        """
        await self._endpoint.open()
        renderer = Renderer(context.tokenizer, context.chat_template_kwargs)
        sessions = [Session(engine, context, renderer, index=i, seed=seed) for i, seed in enumerate(seeds)]
        results = await gather_or_cancel([self._episode(prompt, session, engine) for session in sessions])
        return [sample for samples in results for sample in samples]

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics ``agent/*`` since the last call."""
        metrics = tuple(Sum(f"agent/{name}", float(self._counts[name])) for name in COUNTS)
        self._counts.clear()
        return metrics

    def warnings(self) -> tuple[str, ...]:
        """Return the warnings since the last call, at most one of each kind."""
        messages, self._warnings = tuple(self._warnings.values()), {}
        return messages

    async def close(self) -> None:
        """Stop the agents and the endpoint."""
        await asyncio.to_thread(self._loop.close)  # a blocked agent may wait for this event loop
        await self._endpoint.close()

    async def _episode(self, prompt: Prompt, session: Session, engine: Engine) -> list[Sample]:
        async with self._semaphores.setdefault(prompt.dataset, asyncio.Semaphore(self._concurrency)):
            key = self._endpoint.open_session(session)
            self._num_running += 1
            try:
                reward, status = await self._run(prompt, session, key, engine)
            finally:
                self._num_running -= 1
                self._endpoint.close_session(key)
        if session.failure is not None:
            raise session.failure
        self._count(session, failed=status is Status.FAILED)
        samples = session.samples(prompt, reward, status)
        self._counts["further_samples"] += len(samples) - 1
        return samples

    async def _run(
        self, prompt: Prompt, session: Session, key: str, engine: Engine
    ) -> tuple[Reward | None, Status | None]:
        """Run the agent. Return its reward or None, and a status that replaces the status of each sample, or None.

        Raises ``AgentError`` if the agent returns something other than a reward or None.
        """
        prompt_input: Any = [deepcopy(dict(message)) for message in prompt.messages] or prompt.text
        metadata = {**deepcopy(dict(prompt.metadata)), "label": prompt.label}
        limit = Deadline("rollout", f"agent, prompt {prompt.prompt_id}", self._seconds).limit
        try:
            work = self._agent(self._endpoint.base_url, key, prompt_input, metadata)
            value = await self._loop.run(
                work, limit, lambda: engine.paused_s if isinstance(engine, ResumableEngine) else 0.0
            )
        except AgentTimeout:
            return None, self._record_timeout(session)
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            return None, self._record_failure(session, error)
        except Exception as error:  # noqa: BLE001  fault boundary: an agent is user code
            return None, self._record_failure(session, error)
        reward = self._reward(value)
        if not session.num_calls and session.end_status is None:
            return None, self._record_no_calls()
        return reward, None

    def _reward(self, value: object) -> Reward | None:
        try:
            return None if value is None else to_reward(value)
        except ValueError as error:
            raise AgentError(f"rollout.agent={self._path} {error}; it must return a finite number or None") from error

    def _record_timeout(self, session: Session) -> Status:
        self._counts["timeouts"] += 1
        self._last_failure = self._warnings["timeout"] = (
            f"rollout.agent={self._path}: a run took longer than rollout.agent_deadline_s={self._seconds:g} and was "
            f"cancelled, after {counted(session.num_calls, 'call')}"
        )
        return Status.FAILED

    def _record_failure(self, session: Session, error: BaseException) -> Status:
        if session.end_status is not None:  # the cause is a refused call, not a bug in the agent
            return session.end_status
        self._counts["failures"] += 1
        self._last_failure = self._warnings["failure"] = f"rollout.agent={self._path} failed: {_error_line(error)}"
        return Status.FAILED

    def _record_no_calls(self) -> Status:
        self._counts["failures"] += 1
        self._last_failure = self._warnings["failure"] = (
            f"rollout.agent={self._path} ended without a successful call: pass base_url and api_key, which it receives as "
            "arguments, to its client"
        )
        return Status.FAILED

    def _count(self, session: Session, *, failed: bool) -> None:
        self._counts["runs"] += 1
        self._counts["calls"] += session.num_calls
        for name in session.overrides.keys() - self._warned_names:
            self._warned_names.add(name)
            override = session.overrides[name]
            self._warnings[name] = (
                f"rollout.agent={self._path} requested {override}: training needs samples at rollout.temperature"
            )
        self._has_succeeded |= not failed
        self._num_consecutive_failures = self._num_consecutive_failures + 1 if failed else 0
        # Failed runs tend to end first: give the runs that started with them time to succeed.
        if self._num_consecutive_failures >= max(
            MAX_FAILURES if self._has_succeeded else MAX_FIRST_FAILURES, self._num_running
        ):
            raise AgentError(
                f"{self._num_consecutive_failures} runs of an agent failed one after another; the last: {self._last_failure}"
            )


def _error_line(error: BaseException) -> str:
    """Return an error and the location that raised it, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f", {last[0].filename}:{last[0].lineno} in {last[0].name}" if last else ""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}{place}"
