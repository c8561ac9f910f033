"""Process pool that runs rewards. Each call has a deadline, so that a reward that hangs does not stop the run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from slime_like.config.schema.reward_names import REMOTE, split_prefix
from slime_like.config.schema.rollout import RewardConfig
from slime_like.data.faults import Recovery
from slime_like.errors import DeadlineExceeded, RewardError
from slime_like.metrics.types import Metric, Sum
from slime_like.reward.latex import only_boxed
from slime_like.reward.process import WorkerDied, WorkerProcess
from slime_like.reward.remote import RemoteReward, SampleRefused, ServerFailed
from slime_like.reward.worker import LOAD_S, Load, ScoreRequest, validated_reward
from slime_like.types import UNTRAINED, Prompt, Reward, Sample, SampleGroup, Status
from slime_like.util.concurrency import gather_or_cancel
from slime_like.util.deadline import Deadline

LOAD_TRIES = 3  # attempts to import a reward, if its process is killed
COUNTS = ("calls", "timeouts", "killed", "remote_failures", "remote_retries", "fallbacks")


class RewardPool:
    """Up to ``reward.workers`` processes and a client of the reward server. Bound to the event loop of the first call.

    If a call takes longer than ``reward.timeout_s``, its process is killed. A process killed for this reason, from outside,
    or for exceeding ``reward.memory_gb`` is replaced. The samples of such calls, and samples that the reward server did not
    score, get ``reward.fallback``; if that is null they fail and enter no baseline. ``reward/timeouts`` and
    ``reward/killed`` count the calls, ``reward/remote_failures`` and ``reward/fallbacks`` the samples. If a reward raises,
    ends its process or returns an invalid value (``validated_reward``), ``RewardError`` ends the run.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._idle: list[WorkerProcess] = []
        self._workers_free = asyncio.Semaphore(config.workers)
        self._remote = RemoteReward(config)
        self._takes_groups: dict[str, bool] = {}
        self._warned_causes: set[tuple[str, str]] = set()  # (reward, kind of warning) already reported
        self._counts: Counter[str] = Counter()
        self._warnings: list[str] = []
        self._loading = asyncio.Lock()
        self._server_down = False  # True once the user was warned
        self._closed = False

    async def score(self, groups: Sequence[SampleGroup], *, unshaped: bool = False) -> list[SampleGroup]:
        """Return new groups in which every sample has a reward.

        If ``unshaped`` (evaluation) and ``reward.weights`` has the key ``rm_type``, only each row's own reward counts, without
        the other weighted rewards. Samples scored by a generate function keep their reward. Other samples that failed or were
        aborted get 0; no reward function is called for them. Raises ``RewardError`` if a reward function cannot be imported,
        raises or ends its process, if the address of the reward server is wrong, or if a sample's reward is invalid.
        """
        return await gather_or_cancel([self._group(group, unshaped) for group in groups])

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics counted since the last call."""
        self._counts["remote_retries"] = self._remote.num_retries
        metrics = tuple(Sum(f"reward/{name}", float(self._counts[name])) for name in COUNTS)
        self._counts.clear()
        self._remote.num_retries = 0
        return metrics

    def warnings(self) -> tuple[str, ...]:
        """Return the messages for the user that were added since the last call."""
        messages, self._warnings = tuple(self._warnings), []
        return messages

    def block_server(self, seconds: float) -> None:
        """Inject a fault of ``chaos.*``: the reward server is unreachable for ``seconds``."""
        self._remote.inject_outage(seconds)

    def take_recoveries(self) -> tuple[Recovery, ...]:
        """Return the records of injected outages of the reward server, and forget the outages whose record is complete."""
        return self._remote.take_recoveries()

    def close(self) -> None:
        """End all idle processes and wait until they have ended. No process can be used or started afterwards."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def stop(self) -> None:
        """Close the pool and the connections to the reward server."""
        try:
            await asyncio.to_thread(self.close)
        finally:
            await self._remote.close()

    async def _group(self, group: SampleGroup, unshaped: bool) -> SampleGroup:
        unscored_samples = [s for s in group.samples if s.reward is None and s.status not in UNTRAINED]
        weights = self._config.components(group.prompt.rm_type, unshaped=unshaped)
        parts = (
            await gather_or_cancel([self._part(name, group.prompt, unscored_samples) for name in weights])
            if unscored_samples
            else []
        )
        scored_samples = {
            id(sample): self._with_reward(sample, None if None in rewards else _compose(weights, rewards))
            for sample, rewards in zip(unscored_samples, zip(*parts, strict=True), strict=True)
        }
        return replace(
            group, samples=tuple(scored_samples.get(id(s)) or _with_checked_reward(s) for s in group.samples)
        )

    def _with_reward(self, sample: Sample, reward: Reward | None) -> Sample:
        """Return the sample with ``reward`` or, if this is None, with the score from the config key ``reward.fallback``.

        If the key is null, the sample gets a reward of 0 and is marked as failed. The metric ``reward/fallbacks``
        counts the samples for which ``reward`` is None.
        """
        if reward is not None:
            return replace(sample, reward=reward)
        self._counts["fallbacks"] += 1
        if self._config.fallback is None:
            return replace(sample, reward=Reward(0.0), status=Status.FAILED)
        return replace(sample, reward=Reward(self._config.fallback))

    async def _part(self, name: str, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward | None]:
        """Return the reward ``name`` of each sample; None if its call was late or killed, or the server did not score it."""
        if split_prefix(name)[1] == REMOTE:
            return await gather_or_cancel([self._query_server(name, prompt, sample) for sample in samples])
        if await self._is_for_groups(name):
            return list(await self._call(name, prompt, tuple(samples)))
        results = await gather_or_cancel([self._call(name, prompt, (sample,)) for sample in samples])
        return [rewards[0] for rewards in results]

    async def _is_for_groups(self, name: str) -> bool:
        """Return whether the reward takes groups, importing it on first use.

        Raises ``RewardError`` if the import fails, or if the importing process is killed ``LOAD_TRIES`` times.
        """
        async with self._loading:
            for attempt in range(LOAD_TRIES):
                if name in self._takes_groups:
                    break
                try:
                    async with self._workers_free, self._worker() as worker:
                        self._takes_groups[name] = await _load(worker, name)
                except WorkerDied as error:
                    if attempt == LOAD_TRIES - 1:
                        raise RewardError(
                            f"reward {name!r} could not be imported: {self._death(error)}, {LOAD_TRIES} times"
                        ) from error
        return self._takes_groups[name]

    async def _call(self, name: str, prompt: Prompt, samples: tuple[Sample, ...]) -> Sequence[Reward | None]:
        self._counts["calls"] += 1
        try:
            async with self._workers_free, self._worker() as worker:
                await _load(worker, name)
                request = ScoreRequest(name, prompt, samples)
                answer = await worker.call(request, Deadline("reward pool", "score", self._config.timeout_s))
        except DeadlineExceeded:
            self._counts["timeouts"] += 1
            self._warn_late(name, prompt, samples)
            return [None] * len(samples)
        except WorkerDied as error:
            if not error.killed:
                raise _reward_error(name, str(error), prompt, samples) from error
            self._counts["killed"] += 1
            self._warn_killed(error, name, prompt, samples)
            return [None] * len(samples)
        if answer.fault:
            raise _reward_error(name, answer.fault, prompt, samples)
        return answer.rewards

    @asynccontextmanager
    async def _worker(self) -> AsyncGenerator[WorkerProcess]:
        assert not self._closed, "the reward pool is closed"
        worker = self._idle.pop() if self._idle else None
        if worker is not None and not worker.alive:  # killed from outside while idle
            await asyncio.to_thread(worker.kill)
            worker = None
        worker = worker or WorkerProcess(self._config.timeout_s, int((self._config.memory_gb or 0) * 2**30))
        try:
            yield worker
        except BaseException:  # a call that timed out or was cancelled may still run in its process
            await asyncio.to_thread(worker.kill)
            raise
        self._idle.append(worker)

    async def _query_server(self, name: str, prompt: Prompt, sample: Sample) -> Reward | None:
        self._counts["calls"] += 1
        try:
            reward = await self._remote(prompt, only_boxed(sample) if split_prefix(name)[0] else sample)
        except SampleRefused as error:
            self._counts["remote_failures"] += 1
            self._note_response()
            self._warn_refused(error, name, prompt, sample)
            return None
        except (TimeoutError, ServerFailed) as error:
            self._counts["remote_failures"] += 1
            self._warn_server_down(error)
            return None
        self._note_response()
        return reward

    def _note_response(self) -> None:
        if self._server_down:
            self._warnings.append(f"the reward server {self._config.remote_url} responds again")
            self._server_down = False

    def _warn_refused(self, error: SampleRefused, name: str, prompt: Prompt, sample: Sample) -> None:
        """Warn once per reward, naming the first refused sample; ``reward/remote_failures`` counts all of them."""
        self._warn_once(
            name,
            "refused",
            f"the reward server {self._config.remote_url} refused {_describe_samples([sample])} of prompt "
            f"{prompt.prompt_id} ({prompt.dataset}) with {error}: refused samples {self._fallback()} (reward.fallback); "
            "reward/remote_failures counts them",
        )

    def _warn_late(self, name: str, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Warn once per reward, naming the samples of its first late call; ``reward/timeouts`` counts all late calls."""
        self._warn_once(
            name,
            "late",
            f"reward {name!r} took longer than reward.timeout_s={self._config.timeout_s:g} for {_describe_samples(samples)} of prompt "
            f"{prompt.prompt_id} ({prompt.dataset}): late samples {self._fallback()} (reward.fallback); "
            "reward/timeouts counts such calls",
        )

    def _warn_killed(self, error: WorkerDied, name: str, prompt: Prompt, samples: Sequence[Sample]) -> None:
        """Warn once per reward and cause; ``reward/killed`` counts all such calls."""
        self._warn_once(
            name,
            str(error),
            f"{self._death(error)}, while it ran reward {name!r} for {_describe_samples(samples)} of prompt {prompt.prompt_id} "
            f"({prompt.dataset}): it is replaced, and such samples {self._fallback()} (reward.fallback); "
            "reward/killed counts them",
        )

    def _warn_once(self, name: str, cause: str, text: str) -> None:
        """Add a warning, unless there has been one for this reward and cause."""
        if (name, cause) not in self._warned_causes:
            self._warned_causes.add((name, cause))
            self._warnings.append(text)

    def _death(self, error: WorkerDied) -> str:
        limit = self._config.memory_gb
        limit_text = "has no limit" if limit is None else f"is {limit:g}"
        return f"a process of the reward pool {error} (reward.memory_gb, the memory it may take, {limit_text})"

    def _fallback(self) -> str:
        value = self._config.fallback
        return "are excluded from training" if value is None else f"count as {value:g}"

    def _warn_server_down(self, error: Exception) -> None:
        """Warn that the reward server did not respond. Later calls do nothing until it scores or refuses a sample again."""
        if self._server_down:
            return
        self._server_down = True
        self._warnings.append(
            f"the reward server {self._config.remote_url} does not score ({error}), with reward.remote_retries="
            f"{self._config.remote_retries} within reward.timeout_s={self._config.timeout_s:g}: its samples {self._fallback()} "
            "(reward.fallback) until it does; reward/remote_failures counts them"
        )


def _compose(weights: Mapping[str, float], parts: Sequence[Reward]) -> Reward:
    """Return a reward with the weighted sum of the scores, the first accuracy that is not None, and each score by name.

    A single part of weight 1 is returned unchanged.
    """
    if len(parts) == 1 and list(weights.values()) == [1.0]:
        return parts[0]
    score = sum(weight * part.score for weight, part in zip(weights.values(), parts, strict=True))
    accuracy = next((part.accuracy for part in parts if part.accuracy is not None), None)
    return Reward(score, accuracy, tuple((name, part.score) for name, part in zip(weights, parts, strict=True)))


async def _load(worker: WorkerProcess, name: str) -> bool:
    """Import the reward before its first call, outside the call's deadline, and return whether it takes groups.

    Raises ``WorkerDied`` if the process was killed, and ``RewardError`` if the import fails otherwise or takes longer than
    ``LOAD_S``.
    """
    if name in worker.loaded:
        return worker.loaded[name]
    try:
        answer = await worker.call(Load(name), Deadline("reward pool", "load", LOAD_S))
    except (DeadlineExceeded, WorkerDied) as error:
        if isinstance(error, WorkerDied) and error.killed:
            raise
        raise RewardError(f"reward {name!r} could not be imported in a worker: {error}") from error
    if answer.fault:
        raise RewardError(f"reward {name!r} could not be imported in a worker: {answer.fault}")
    worker.loaded[name] = answer.groups
    return answer.groups


def _with_checked_reward(sample: Sample) -> Sample:
    """Return the sample with the reward that its generate function assigned, or 0 if it has none.

    Raises ``RewardError`` if that reward is invalid.
    """
    if sample.reward is None:
        return replace(sample, reward=Reward(0.0))
    try:
        validated_reward(sample.reward.score, sample.reward.accuracy)
    except ValueError as error:
        raise RewardError(
            f"sample {sample.sample_id} of group {sample.group_id} came from rollout.generate or rollout.agent with the "
            f"reward {error}"
        ) from error
    return sample


def _describe_samples(samples: Sequence[Sample]) -> str:
    return f"sample {samples[0].sample_id}" if len(samples) == 1 else f"the {len(samples)} samples"


def _reward_error(name: str, problem: str, prompt: Prompt, samples: Sequence[Sample]) -> RewardError:
    return RewardError(
        f"reward {name!r} {problem}, for {_describe_samples(samples)} of prompt {prompt.prompt_id} ({prompt.dataset}); "
        f"a reward must return a finite number for every sample: return 0.0 for an answer that cannot be scored"
    )
