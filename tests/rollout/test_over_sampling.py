"""Over-sampling and partial rollouts: no sample is lost or duplicated by stops, pushes, resumes or engine failures."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.data.dump import load_groups, save_groups
from slime_like.data.share import SINGLE, ManagerShare, share_of_source
from slime_like.errors import DataError, RewardError
from slime_like.interfaces import Sampling
from slime_like.rollout.collect import sampler
from slime_like.rollout.collect.group_filters import FilterReport
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.over_sampling import OverSamplingCollector
from slime_like.rollout.collect.sampler import GroupRequest, PauseGate, ResumableEngine
from slime_like.rollout.collect.state import GeneratedRollout, RolloutState
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import RequestCounts
from slime_like.types import Sample, SampleGroup, Source, Span
from tests.rollout.counting import Counting
from tests.rollout.slow_engine import SlowSupervisor, token

N = 2  # samples per prompt


@dataclass(frozen=True)
class Refills:
    batch_size: int
    round_size: int
    max_refills: int


@dataclass(frozen=True)
class Partial:
    enabled: bool
    max_staleness: float


@dataclass(frozen=True)
class SamplingSetting:
    policy: Refills
    partial: Partial
    num_engines: int = 1
    passes: tuple[bool, ...] = (True,)  # prompt i of the share passes the filters if entry i % len is True
    dies: int = 0  # an engine dies with probability 1 / dies per step; 0: never
    share: ManagerShare = SINGLE  # the sizes of ``policy`` are those of this share


def length(seed: int) -> int:
    """Return the number of tokens of a sample; most are short."""
    return 40 if seed % 11 == 0 else 1 + seed % 5


@dataclass
class RolloutProcess:
    """Rollout side of one process, including its engines, which serve ``version``.

    It replaces ``GroupSampler`` and ``GroupFilters``.
    """

    setting: SamplingSetting
    rng: random.Random
    version: int
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [f"engine {i}" for i in range(self.setting.num_engines)]
        self.supervisors = [SlowSupervisor(self.rng, self.version, name, self.setting.dies) for name in names]
        self.pool = EnginePool(self.supervisors, HealthConfig(max_restarts=1000), receives_pushes=False)  # pyright: ignore[reportArgumentType]
        policy, partial, share = self.setting.policy, self.setting.partial, self.setting.share
        config = RolloutConfig(
            batch_size=policy.batch_size * share.num_shares,
            over_sampling_batch_size=policy.round_size * share.num_shares,
            max_refills=policy.max_refills,
            n_samples_per_prompt=N,
            partial_rollout=partial.enabled,
            request_deadline_s=30,
        )
        sampler: Any = self
        self.source = share_of_source(Counting(), share)
        self.oversampler = OverSamplingCollector(
            config, Sampling(1.0, 1), self.source, sampler, partial.max_staleness, share
        )
        self.oversampler._filters = sampler
        self.prompts = self.oversampler._prompts

    @property
    def num_taken(self) -> int:
        return cast(int, self.source.state()["taken"])

    async def group(
        self, request: GroupRequest, journal: CallJournal, gate: PauseGate, generated: Callable[[], None]
    ) -> SampleGroup:
        seeds = [request.group_id * N + i for i in range(N)]
        with self.pool.router.assign(1) as assignment:
            engine = ResumableEngine(self.pool, assignment, journal, gate, RequestCounts(len(self.supervisors)))
            calls = [engine.generate(request.prompt.token_ids, [s], Sampling(1.0, length(s))) for s in seeds]
            completions = [c for cs in await asyncio.gather(*calls) for c in cs]
        generated()
        for _ in range(self.rng.randrange(4)):  # time that the reward takes
            await asyncio.sleep(0)
        start, samples = len(request.prompt.token_ids), []
        for seed, c in zip(seeds, completions, strict=True):
            spans = [Span(start + a, start + b, Source.MODEL, v) for a, b, v in c.versions]
            ids = np.concatenate([request.prompt.token_ids, c.token_ids])
            logprobs = np.concatenate([np.full(start, np.nan, np.float32), c.logprobs])
            all_spans = (Span(0, start, Source.PROMPT), *spans)
            samples.append(Sample(request.group_id, seed, seed, seed, ids, logprobs, all_spans, STATUS[c.finish]))
        return SampleGroup(request.group_id, request.prompt, tuple(samples))

    def keep(self, group: SampleGroup) -> bool:
        number = group.prompt.prompt_id // self.setting.share.num_shares
        passes = self.setting.passes[number % len(self.setting.passes)]
        if not passes:
            self.dropped.append(group.prompt.prompt_id)
        return passes

    def report(self) -> FilterReport:
        return FilterReport()

    def restore(self, state: RolloutState) -> None:
        self.source.load_state(state.cursor)
        self.oversampler.restore(state)

    def push(self, version: int) -> None:
        for supervisor in self.supervisors:
            supervisor.push(version)

    async def close(self) -> None:
        await self.oversampler.close()
        await self.pool.stop()
        tasks = [task for supervisor in self.supervisors for task in supervisor.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def no_waiting() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "ABORT_AGAIN_S", 0.0)
        yield


def check_tokens(group: SampleGroup, rollout_id: int) -> None:
    """Check that every token occurs once, in order, with its log-probability and version."""
    start = len(group.prompt.token_ids)
    for sample in group.samples:
        assert sample.num_response_tokens == length(sample.seed)
        expected = [token(sample.seed, p) for p in range(start, len(sample.token_ids))]
        assert sample.token_ids[start:].tolist() == expected
        assert sample.logprobs[start:].tolist() == expected  # SlowEngine's log-probabilities are its tokens
        assert list(sample.versions) == sorted(sample.versions)
        assert all(0 <= version <= rollout_id for version in sample.versions)


async def assert_history(setting: SamplingSetting, rng: random.Random, resumes: list[int], folder: Path) -> None:
    """Run five rollouts, repeat those in ``resumes`` in a new process, and assert that no prompt or token is lost."""
    process, trained_groups, dropped_ids = RolloutProcess(setting, rng, 0), [], []
    for rollout_id in range(5):
        saved_state = process.oversampler.state()
        if rollout_id in resumes:
            await process.oversampler.generate(rollout_id)
            await process.close()
            save_groups(folder / "in_flight.npz", saved_state.in_flight())
            process = RolloutProcess(setting, rng, rollout_id)
            process.restore(RolloutState.from_groups(saved_state.cursor, load_groups(folder / "in_flight.npz")))
        before = len(process.dropped)
        groups = (await process.oversampler.generate(rollout_id)).groups
        assert len(groups) == setting.policy.batch_size
        assert [g.group_id for g in groups] == sorted(g.group_id for g in groups)
        for group in groups:
            check_tokens(group, rollout_id)
            assert rollout_id - group.oldest_version <= (
                setting.partial.max_staleness if setting.partial.enabled else 0
            )
        trained_groups += groups
        dropped_ids += process.dropped[before:]
        process.push(rollout_id + 1)
    state = process.oversampler.state()
    await process.close()
    places = [
        *(group.prompt.prompt_id for group in trained_groups),
        *dropped_ids,
        *(waiting.prompt.prompt_id for waiting in state.queued),
        *(unfinished.prompt.prompt_id for unfinished in state.partial_groups),
    ]
    share = setting.share
    assert sorted(places) == list(share.of(range(state.cursor["taken"])))  # none lost, none duplicated
    ids = [*(group.group_id for group in trained_groups), *(unfinished.group_id for unfinished in state.partial_groups)]
    assert len(ids) == len(set(ids)) and {i % share.num_shares for i in ids} == {share.index}


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    extra=st.integers(0, 4),
    partial=st.booleans(),
    bound=st.integers(1, 3),
    num_engines=st.integers(1, 2),
    passes=st.lists(st.booleans(), min_size=1, max_size=4).filter(any),
    dies=st.sampled_from([0, 20, 100]),
    resumes=st.lists(st.integers(0, 4), max_size=2),
    share=st.sampled_from([SINGLE, ManagerShare(0, 2), ManagerShare(2, 3)]),
)
def test_no_prompt_or_token_is_lost_or_duplicated(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    batch: int,
    extra: int,
    partial: bool,
    bound: int,
    num_engines: int,
    passes: list[bool],
    dies: int,
    resumes: list[int],
    share: ManagerShare,
) -> None:
    setting = SamplingSetting(
        Refills(batch, batch + extra, 50), Partial(partial, bound), num_engines, tuple(passes), dies, share
    )
    with no_waiting():
        asyncio.run(assert_history(setting, random.Random(seed), resumes, tmp_path_factory.getbasetemp()))


def collect(
    setting: SamplingSetting, rollouts: int, seed: int = 0, *, pushes: bool = True
) -> tuple[list[GeneratedRollout], RolloutProcess, dict[str, float]]:
    async def run() -> tuple[list[GeneratedRollout], RolloutProcess, dict[str, float]]:
        process, results = RolloutProcess(setting, random.Random(seed), 0), []
        for rollout_id in range(rollouts):
            results.append(await process.oversampler.generate(rollout_id))
            process.push(rollout_id + 1 if pushes else 0)
        counts = {metric.name: metric.value for metric in process.oversampler.metrics()}
        await process.close()
        return results, process, counts

    with no_waiting():
        return asyncio.run(run())


def test_long_answers_are_continued_until_they_end() -> None:
    rollouts, process, counts = collect(SamplingSetting(Refills(3, 6, 0), Partial(True, 2)), 20)
    used_groups = [group for collected in rollouts for group in collected.groups]
    long = [group for group in used_groups if any(length(sample.seed) == 40 for sample in group.samples)]
    assert len(long) > 5
    assert all(
        unfinished.group_id // 6 >= 20 - 3 for unfinished in process.oversampler.partial_groups()
    )  # started recently
    assert any(len(set(sample.versions)) > 1 for group in long for sample in group.samples)
    assert counts["rollout/wasted_tokens"] == 0
    assert counts["rollout/restarted_groups"] == 0
    assert counts["rollout/stopped_groups"] > 0


@pytest.mark.parametrize("num_engines", [1, 2])
def test_groups_of_lost_engines_continue_their_answers(num_engines: int) -> None:
    """A recovery counts each group once, regardless of how many of its requests were lost."""
    rollouts, process, counts = collect(SamplingSetting(Refills(3, 6, 0), Partial(True, 2), num_engines, dies=25), 10)
    for i, collected in enumerate(rollouts):
        for group in collected.groups:
            check_tokens(group, i)
    restarts, remade = process.pool.take_restart_counts()
    recoveries = process.pool.recoveries
    assert len(recoveries) >= restarts > 5
    assert sum(recovery.groups for recovery in recoveries) == remade
    assert 3 < max(recovery.groups for recovery in recoveries) <= 6  # in flight concurrently
    assert counts["rollout/wasted_tokens"] == 0
    ids = [group.group_id for collected in rollouts for group in collected.groups]
    assert len(set(ids)) == len(ids) == 30


def test_without_partial_rollouts_prompts_of_stopped_groups_come_first() -> None:
    rollouts, process, counts = collect(SamplingSetting(Refills(3, 5, 0), Partial(False, 9)), 2)
    assert all(group.oldest_version == i for i, collected in enumerate(rollouts) for group in collected.groups)
    assert process.num_taken == 2 * 3 + 2
    assert len(process.prompts.queued) == 2
    assert process.oversampler.partial_groups() == ()
    assert counts["rollout/wasted_tokens"] > 0


def test_a_prompt_given_up_three_times_is_completed() -> None:
    rollouts, process, _ = collect(SamplingSetting(Refills(2, 4, 0), Partial(False, 9)), 30)
    rollout_of_prompt = {g.prompt.prompt_id: i for i, collected in enumerate(rollouts) for g in collected.groups}
    assert max(waiting.num_aborts for waiting in process.prompts.queued) <= 3
    assert set(range(40)) <= set(rollout_of_prompt)  # 40 of about 60 prompts; no early one was starved


def test_groups_that_are_too_stale_are_restarted() -> None:
    """Each rollout uses 1 of 8 groups. A group that would lag by more than one weight version is restarted."""
    rollouts, process, counts = collect(SamplingSetting(Refills(1, 8, 0), Partial(True, 1)), 6)
    assert counts["rollout/restarted_groups"] > 0
    assert all(i - group.oldest_version <= 1 for i, collected in enumerate(rollouts) for group in collected.groups)
    places = [g.prompt.prompt_id for collected in rollouts for g in collected.groups]
    places += [w.prompt.prompt_id for w in process.prompts.queued] + [
        u.prompt.prompt_id for u in process.oversampler.partial_groups()
    ]
    assert sorted(places) == list(range(process.num_taken))


def test_without_pushes_no_group_becomes_stale() -> None:
    rollouts, _, counts = collect(SamplingSetting(Refills(1, 8, 0), Partial(True, math.inf)), 6, pushes=False)
    assert counts["rollout/restarted_groups"] == counts["rollout/wasted_tokens"] == 0
    assert all(group.oldest_version == 0 for collected in rollouts for group in collected.groups)


def test_filters_that_drop_nearly_everything_end_in_an_error() -> None:
    with pytest.raises(DataError, match=r"rollout 0: .*max_refills=2 .* 0 of 12 groups .*batch_size=3"):
        collect(SamplingSetting(Refills(3, 4, 2), Partial(True, 2), passes=(False,)), 1)


def test_without_refills_only_passing_groups_are_returned() -> None:
    rollouts, _, _ = collect(SamplingSetting(Refills(3, 4, 0), Partial(True, 2), passes=(True, False)), 1)
    assert [group.prompt.prompt_id for group in rollouts[0].groups] == [0, 2]


def test_a_failing_group_ends_the_rollout_without_leaving_tasks() -> None:
    async def run() -> int:
        process = RolloutProcess(SamplingSetting(Refills(2, 4, 0), Partial(True, 2)), random.Random(0), 0)

        sample = process.group

        async def fail(
            request: GroupRequest, journal: CallJournal, gate: PauseGate, generated: Callable[[], None]
        ) -> SampleGroup:
            if request.group_id == 1:
                raise RewardError("broken")
            return await sample(request, journal, gate, generated)

        process.group = fail
        with pytest.raises(RewardError, match="broken"):
            await process.oversampler.generate(0)
        await process.close()
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    with no_waiting():
        assert asyncio.run(run()) == 0
