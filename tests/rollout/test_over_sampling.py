"""Over-sampling and partial rollouts: no sample lost or doubled, whatever ends first, is stopped, pushed, resumed or dies."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.faults import HealthConfig
from slime_like.data.dump import load_groups, save_groups
from slime_like.errors import DataError, RewardError
from slime_like.interfaces import Sampling
from slime_like.rollout.collect import resumable
from slime_like.rollout.collect.over_sampling import GroupTask, OverSampling, OverSamplingCallbacks, Partial
from slime_like.rollout.collect.prompt_queue import PromptQueue
from slime_like.rollout.collect.refill import CollectedGroups, RefillPolicy
from slime_like.rollout.collect.resumable import PauseGate, ResumableEngine
from slime_like.rollout.collect.state import RolloutState
from slime_like.rollout.collect.usage import Usage
from slime_like.rollout.generate.single_turn import STATUS
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.types import Sample, SampleGroup, Source, Span
from slime_like.util.deadline import Deadline
from tests.rollout.counting import Counting
from tests.rollout.slow_engine import SlowSupervisor, token

N = 2  # samples per prompt


@dataclass(frozen=True)
class Setting:
    how: RefillPolicy
    partial: Partial
    num_engines: int = 1
    passes: tuple[bool, ...] = (True,)  # prompt i passes the filters as entry i says, over and over
    dies: int = 0  # an engine dies at one step in so many


def length(seed: int) -> int:
    """Tokens of a sample: most are short."""
    return 40 if seed % 11 == 0 else 1 + seed % 5


@dataclass
class Process:
    """The rollout side of one process, engines included; ``version`` is what they serve."""

    setting: Setting
    rng: random.Random
    version: int
    dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = PromptQueue(Counting())
        names = [f"engine {i}" for i in range(self.setting.num_engines)]
        self.supervisors = [SlowSupervisor(self.rng, self.version, name, self.setting.dies) for name in names]
        self.pool = EnginePool(self.supervisors, HealthConfig(max_restarts=1000), pushed=False)  # pyright: ignore[reportArgumentType]
        self.gate = PauseGate()
        hands = OverSamplingCallbacks(self.answer, self.keep, self.gate.open, self.stop)
        self.oversampler = OverSampling(self.setting.how, self.setting.partial, self.prompts, hands)

    async def answer(self, work: GroupTask) -> SampleGroup:
        seeds = [work.group_id * N + i for i in range(N)]
        with self.pool.router.lease(1) as lease:
            engine = ResumableEngine(lease, work.journal, self.gate, Usage(len(self.supervisors)))
            asked = [engine.generate(work.prompt.token_ids, [s], Sampling(1.0, length(s))) for s in seeds]
            found = [c for cs in await asyncio.gather(*asked) for c in cs]
        work.on_generated()
        for _ in range(self.rng.randrange(4)):  # its reward
            await asyncio.sleep(0)
        start, samples = len(work.prompt.token_ids), []
        for seed, c in zip(seeds, found, strict=True):
            spans = [Span(start + a, start + b, Source.MODEL, v) for a, b, v in c.versions]
            ids = np.concatenate([work.prompt.token_ids, c.token_ids])
            logprobs = np.concatenate([np.full(start, np.nan, np.float32), c.logprobs])
            whole = (Span(0, start, Source.PROMPT), *spans)
            samples.append(Sample(work.group_id, seed, seed, seed, ids, logprobs, whole, STATUS[c.finish]))
        return SampleGroup(work.group_id, work.prompt, tuple(samples))

    def keep(self, group: SampleGroup) -> bool:
        passes = self.setting.passes[group.prompt.prompt_id % len(self.setting.passes)]
        if not passes:
            self.dropped.append(group.prompt.prompt_id)
        return passes

    async def stop(self) -> None:
        await self.gate.shut(self.pool.abort_all, Deadline("test", "stop", 30))

    def state(self) -> RolloutState:
        return RolloutState(self.prompts.source.state(), self.prompts.returned, self.oversampler.unfinished())

    def restore(self, state: RolloutState) -> None:
        self.prompts.source.load_state(state.cursor)
        self.prompts.give_back(state.returned)
        self.oversampler.restore(state.unfinished)

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
        patch.setattr(resumable, "ABORT_AGAIN_S", 0.0)
        yield


def check_tokens(group: SampleGroup, rollout_id: int) -> None:
    """Every token once, in its place, with log-probability and version of its own."""
    start = len(group.prompt.token_ids)
    for sample in group.samples:
        assert sample.num_response_tokens == length(sample.seed)
        expected = [token(sample.seed, p) for p in range(start, len(sample.token_ids))]
        assert sample.token_ids[start:].tolist() == expected
        assert sample.logprobs[start:].tolist() == expected  # SlowEngine's log-probabilities are its tokens
        assert list(sample.versions) == sorted(sample.versions)
        assert all(0 <= version <= rollout_id for version in sample.versions)


async def assert_history(setting: Setting, rng: random.Random, resumes: list[int], folder: Path) -> None:
    """Five rollouts, of which ``resumes`` are made again by another process, from what was written before them."""
    process, trained, dropped = Process(setting, rng, 0), [], []
    for rollout_id in range(5):
        saved = process.state()
        if rollout_id in resumes:
            await process.oversampler.make(rollout_id)
            await process.close()
            save_groups(folder / "in_flight.npz", saved.in_flight())
            process = Process(setting, rng, rollout_id)
            process.restore(RolloutState.of(saved.cursor, load_groups(folder / "in_flight.npz")))
        before = len(process.dropped)
        groups = (await process.oversampler.make(rollout_id)).groups
        assert len(groups) == setting.how.batch_size
        assert [g.group_id for g in groups] == sorted(g.group_id for g in groups)
        for group in groups:
            check_tokens(group, rollout_id)
            assert rollout_id - group.oldest_version <= (
                setting.partial.max_staleness if setting.partial.enabled else 0
            )
        trained += groups
        dropped += process.dropped[before:]
        process.push(rollout_id + 1)
    state = process.state()
    await process.close()
    places = [
        *(group.prompt.prompt_id for group in trained),
        *dropped,
        *(waiting.prompt.prompt_id for waiting in state.returned),
        *(unfinished.prompt.prompt_id for unfinished in state.unfinished),
    ]
    assert sorted(places) == list(range(state.cursor["taken"]))  # none lost, none doubled
    ids = [*(group.group_id for group in trained), *(unfinished.group_id for unfinished in state.unfinished)]
    assert len(ids) == len(set(ids))


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
)
def test_every_prompt_is_in_one_place_and_every_token_is_sampled_once(
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
) -> None:
    setting = Setting(RefillPolicy(batch, batch + extra, 50), Partial(partial, bound), num_engines, tuple(passes), dies)
    with no_waiting():
        asyncio.run(assert_history(setting, random.Random(seed), resumes, tmp_path_factory.getbasetemp()))


def collect(
    setting: Setting, rollouts: int, seed: int = 0, *, pushes: bool = True
) -> tuple[list[CollectedGroups], Process, dict[str, float]]:
    async def run() -> tuple[list[CollectedGroups], Process, dict[str, float]]:
        process, made = Process(setting, random.Random(seed), 0), []
        for rollout_id in range(rollouts):
            made.append(await process.oversampler.make(rollout_id))
            process.push(rollout_id + 1 if pushes else 0)
        counts = {metric.name: metric.value for metric in process.oversampler.metrics()}
        await process.close()
        return made, process, counts

    with no_waiting():
        return asyncio.run(run())


def test_long_answers_are_continued_until_they_end_and_none_is_left_out() -> None:
    made, process, counts = collect(Setting(RefillPolicy(3, 6, 0), Partial(True, 2)), 20)
    used = [group for filled in made for group in filled.groups]
    long = [group for group in used if any(length(sample.seed) == 40 for sample in group.samples)]
    assert len(long) > 5
    assert all(unfinished.group_id // 6 >= 20 - 3 for unfinished in process.oversampler.unfinished())  # begun lately
    assert any(len(set(sample.versions)) > 1 for group in long for sample in group.samples)
    assert counts["rollout/wasted_tokens"] == 0
    assert counts["rollout/restarted_groups"] == 0
    assert counts["rollout/stopped_groups"] > 0


@pytest.mark.parametrize("num_engines", [1, 2])
def test_groups_of_engines_that_die_go_on_with_the_answers_they_had(num_engines: int) -> None:
    """Each group counts once per engine that it lost, however many of its requests were there."""
    made, process, counts = collect(Setting(RefillPolicy(3, 6, 0), Partial(True, 2), num_engines, dies=25), 10)
    for i, filled in enumerate(made):
        for group in filled.groups:
            check_tokens(group, i)
    restarts, remade = process.pool.take_restart_counts()
    lost = process.pool.recoveries
    assert len(lost) >= restarts > 5
    assert sum(recovery.groups for recovery in lost) == remade
    assert 3 < max(recovery.groups for recovery in lost) <= 6  # in flight at once
    assert counts["rollout/wasted_tokens"] == 0
    ids = [group.group_id for filled in made for group in filled.groups]
    assert len(set(ids)) == len(ids) == 30


def test_without_partial_rollouts_what_is_stopped_is_given_up_and_its_prompt_comes_first() -> None:
    made, process, counts = collect(Setting(RefillPolicy(3, 5, 0), Partial(False, 9)), 2)
    assert all(group.oldest_version == i for i, filled in enumerate(made) for group in filled.groups)
    assert process.prompts.source.state() == {"taken": 2 * 3 + 2}
    assert len(process.prompts.returned) == 2
    assert process.oversampler.unfinished() == ()
    assert counts["rollout/wasted_tokens"] > 0


def test_a_prompt_that_was_given_up_three_times_is_waited_for() -> None:
    made, process, _ = collect(Setting(RefillPolicy(2, 4, 0), Partial(False, 9)), 30)
    rollouts = {g.prompt.prompt_id: i for i, filled in enumerate(made) for g in filled.groups}
    assert max(waiting.given_up for waiting in process.prompts.returned) <= 3
    assert set(range(40)) <= set(rollouts)  # of some 60: none of the early ones was passed over for ever


def test_what_is_too_old_to_go_on_is_answered_anew() -> None:
    """More groups are due at once than a rollout holds: 1 is taken of 8, and none may wait longer than one version."""
    made, process, counts = collect(Setting(RefillPolicy(1, 8, 0), Partial(True, 1)), 6)
    assert counts["rollout/restarted_groups"] > 0
    assert all(i - group.oldest_version <= 1 for i, filled in enumerate(made) for group in filled.groups)
    places = [g.prompt.prompt_id for filled in made for g in filled.groups]
    places += [w.prompt.prompt_id for w in process.prompts.returned] + [
        u.prompt.prompt_id for u in process.oversampler.unfinished()
    ]
    assert sorted(places) == list(range(process.prompts.source.state()["taken"]))


def test_where_nothing_is_pushed_nothing_grows_old() -> None:
    made, _, counts = collect(Setting(RefillPolicy(1, 8, 0), Partial(True, math.inf)), 6, pushes=False)
    assert counts["rollout/restarted_groups"] == counts["rollout/wasted_tokens"] == 0
    assert all(group.oldest_version == 0 for filled in made for group in filled.groups)


def test_filters_that_hardly_anything_passes_are_named() -> None:
    with pytest.raises(DataError, match=r"rollout 0: .*max_refills=2 .* 0 of 12 groups .*batch_size=3"):
        collect(Setting(RefillPolicy(3, 4, 2), Partial(True, 2), passes=(False,)), 1)


def test_without_refills_what_passes_is_all_there_is() -> None:
    made, _, _ = collect(Setting(RefillPolicy(3, 4, 0), Partial(True, 2), passes=(True, False)), 1)
    assert [group.prompt.prompt_id for group in made[0].groups] == [0, 2]


def test_a_group_that_fails_ends_the_rollout_and_leaves_no_task() -> None:
    async def run() -> int:
        process = Process(Setting(RefillPolicy(2, 4, 0), Partial(True, 2)), random.Random(0), 0)

        async def fail(work: GroupTask) -> SampleGroup:
            if work.group_id == 1:
                raise RewardError("broken")
            return await process.answer(work)

        hands = OverSamplingCallbacks(fail, process.keep, process.gate.open, process.stop)
        oversampler = OverSampling(process.setting.how, process.setting.partial, process.prompts, hands)
        with pytest.raises(RewardError, match="broken"):
            await oversampler.make(0)
        await process.close()
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    with no_waiting():
        assert asyncio.run(run()) == 0
