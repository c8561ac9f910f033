"""Rewards in a pool of processes, each call under a deadline: a reward that hangs costs one sample, never the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from slime_like.config.rollout import RewardConfig
from slime_like.deadline import Deadline
from slime_like.errors import DeadlineExceeded, RewardError
from slime_like.metrics.types import Metric, Sum
from slime_like.reward.process import WorkerDied, WorkerProcess
from slime_like.reward.worker import LOAD_S, Call, Load
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Status

UNSCORED = (Status.FAILED, Status.ABORTED)


class RewardPool:
    """``reward.workers`` processes. Belongs to the event loop that first scores with it.

    A call that takes longer than ``reward.timeout_s`` is killed with its process, which is replaced; the sample gets
    reward 0 and status FAILED, so that it enters no baseline, and ``reward/timeouts`` counts it. A reward that raises,
    ends its process or returns something that is not a finite number raises ``RewardError``: the run ends.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._idle: list[WorkerProcess] = []
        self._places = asyncio.Semaphore(config.workers)
        self._calls = 0
        self._timeouts = 0
        self._closed = False

    async def score(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """New groups in which every sample has a reward.

        Samples that a generate function scored keep their reward; failed and aborted ones get 0 without a call.
        """
        tasks = [[asyncio.ensure_future(self._sample(group.prompt, s)) for s in group.samples] for group in groups]
        everything = [task for group in tasks for task in group]
        try:
            await asyncio.gather(*everything)
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
        return [
            replace(group, samples=tuple(task.result() for task in found))
            for group, found in zip(groups, tasks, strict=True)
        ]

    def metrics(self) -> tuple[Metric, ...]:
        """What happened since the last call of ``metrics``."""
        found = (Sum("reward/calls", float(self._calls)), Sum("reward/timeouts", float(self._timeouts)))
        self._calls = self._timeouts = 0
        return found

    def close(self) -> None:
        """End all processes. Nothing may be scored afterwards."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _sample(self, prompt: Prompt, sample: Sample) -> Sample:
        if sample.reward is not None:
            return sample
        if sample.status in UNSCORED:
            return replace(sample, reward=Reward(0.0))
        name = prompt.rm_type or self._config.name
        async with self._places:
            try:
                return replace(sample, reward=await self._call(name, prompt, sample))
            except DeadlineExceeded:
                self._timeouts += 1
                return replace(sample, reward=Reward(0.0), status=Status.FAILED)

    async def _call(self, name: str, prompt: Prompt, sample: Sample) -> Reward:
        assert not self._closed, "the reward pool is closed"
        self._calls += 1
        worker = self._idle.pop() if self._idle else WorkerProcess(self._config.timeout_s)
        try:
            await self._load(worker, name)
            answer = await worker.ask(
                Call(name, prompt, sample), Deadline("reward pool", "score", self._config.timeout_s)
            )
        except WorkerDied as error:
            raise _fault(name, str(error), prompt, sample) from error
        except BaseException:  # a late or cancelled call leaves its process in the middle of something
            worker.kill()
            raise
        self._idle.append(worker)
        if answer.reward is None:
            raise _fault(name, answer.fault, prompt, sample)
        return answer.reward

    async def _load(self, worker: WorkerProcess, name: str) -> None:
        """Import the reward before its first call, outside the call's deadline."""
        if name in worker.loaded:
            return
        try:
            answer = await worker.ask(Load(name), Deadline("reward pool", "load", LOAD_S))
        except DeadlineExceeded as error:
            raise RewardError(f"reward {name!r} could not be imported in a worker: {error}") from error
        if answer.fault:
            raise RewardError(f"reward {name!r} could not be imported in a worker: {answer.fault}")
        worker.loaded.add(name)


def _fault(name: str, what: str, prompt: Prompt, sample: Sample) -> RewardError:
    return RewardError(
        f"reward {name!r} {what}, for sample {sample.sample_id} of prompt {prompt.prompt_id} ({prompt.dataset}); "
        f"a reward must return a finite number for every sample: return 0.0 for an answer that cannot be scored"
    )
