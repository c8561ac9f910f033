"""Reward pool: real processes, with hanging and dying rewards."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slime_like.config.schema.rollout import RewardConfig
from slime_like.data.group_metrics import group_metrics
from slime_like.errors import DeadlineExceeded, RewardError
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import reduce_metrics
from slime_like.reward import process
from slime_like.reward.pool import COUNTS, RewardPool
from slime_like.reward.worker import ScoreRequest
from slime_like.types import Reward, SampleGroup, Status
from slime_like.util.deadline import Deadline
from tests.reward.scored import group, scores

USERS = "tests.reward.rewards_of_users"
Score = Callable[[Sequence[SampleGroup]], list[SampleGroup]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    reward_pool = RewardPool(RewardConfig(name="answer", workers=2, timeout_s=20))
    yield reward_pool
    reward_pool.close()


@pytest.fixture(scope="module")
def score(pool: RewardPool) -> Iterator[Score]:
    with asyncio.Runner() as runner:
        yield lambda groups: runner.run(pool.score(groups))


def test_every_sample_is_scored_in_place_by_its_rows_reward(pool: RewardPool, score: Score) -> None:
    groups = [group("4", "5", "4.0"), group("4.0", " 4", rm_type="exact"), group("abc", rm_type=f"{USERS}:length")]
    pool.metrics()
    scored_groups = score(groups)
    assert [scores(g) for g in scored_groups] == [[1, 0, 1], [0, 1], [3]]
    assert scored_groups[0].samples[1].reward == Reward(0.0, 0.0)
    assert groups[0].samples[0].reward is None
    assert [replace(s, reward=None) for s in scored_groups[2].samples] == list(groups[2].samples)
    assert reduce_metrics(pool.metrics()) == counts(calls=6)


def test_numpy_numbers_and_rewards_are_numbers(score: Score) -> None:
    assert score([group("a", rm_type=f"{USERS}:shaped")])[0].samples[0].reward == Reward(0.5, 1.0)


def test_workers_import_neither_torch_nor_ray(score: Score) -> None:
    assert scores(score([group("a", "b", rm_type=f"{USERS}:imported_torch")])[0]) == [0.0, 0.0]


def test_scored_and_failed_samples_are_skipped(pool: RewardPool, score: Score) -> None:
    unscored = group("4", "4", "4")
    samples = (
        replace(unscored.samples[0], reward=Reward(0.75)),
        replace(unscored.samples[1], status=Status.FAILED),
        replace(unscored.samples[2], status=Status.ABORTED),
    )
    pool.metrics()
    assert scores(score([replace(unscored, samples=samples)])[0]) == [0.75, 0.0, 0.0]


def test_given_scores_only_truncated_samples(score: Score) -> None:
    """An agent that runs out of tokens cannot return its reward."""
    unscored = group("4", "4", rm_type="given")
    truncated_sample = replace(unscored.samples[0], status=Status.TRUNCATED)
    completed_sample = replace(unscored.samples[1], reward=Reward(0.75))
    assert scores(score([replace(unscored, samples=(truncated_sample, completed_sample))])[0]) == [0.0, 0.75]
    with pytest.raises(RewardError, match="has no reward"):
        score([unscored])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", r"returned nan, not a finite number, for sample 0 of prompt 7 \(train\); a reward must"),
        ("infinite", r"returned inf, not a finite number"),
        ("huge", r"returned inf, not a finite number"),
        ("too_right", r"returned accuracy 7, not a number from 0 to 1"),
        ("text", r"returned '0.5' \(str\), not a number"),
        ("nothing", r"returned None \(NoneType\), not a number"),
        (
            "raises",
            r"raised ZeroDivisionError: .+rewards_of_users.py:\d+\); it printed 'about to divide', for sample 0 of prompt 7",
        ),
        ("calls_sys_exit", r"raised SystemExit: 3 \(.+rewards_of_users.py:\d+\), for sample 0 of prompt 7"),
        ("exits", r"its process ended with exit code 3, for sample 0 of prompt 7"),
        ("three_arguments", r"could not be imported in a worker: raised ConfigError"),
    ],
)
def test_a_faulty_reward_ends_the_run_and_is_named(score: Score, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as error:
        score([group("a", rm_type=f"{USERS}:{name}")])
    assert f"reward '{USERS}:{name}'" in str(error.value)
    assert scores(score([group("4", "5", "4")])[0]) == [1, 0, 1]  # the pool still works


@pytest.mark.parametrize(("fallback", "status"), [(-0.5, Status.COMPLETED), (None, Status.FAILED)])
def test_a_hanging_call_is_killed_with_its_children(tmp_path: Path, fallback: float | None, status: Status) -> None:
    pids = tmp_path / "pids"
    pool = RewardPool(RewardConfig(name=f"{USERS}:hangs_on_x", workers=1, timeout_s=1.5, fallback=fallback))
    try:
        scored_group = asyncio.run(pool.score([group("a", "x", "b", metadata={"pids": str(pids)})]))[0]
    finally:
        pool.close()
    assert scores(scored_group) == [1.0, fallback or 0.0, 1.0]
    assert [s.status for s in scored_group.samples] == [Status.COMPLETED, status, Status.COMPLETED]
    assert reduce_metrics(pool.metrics()) == counts(calls=3, timeouts=1, fallbacks=1)
    (warning,) = pool.warnings()
    consequence = "count as -0.5" if fallback is not None else "are excluded from training"
    for words in ("hangs_on_x", "reward.timeout_s=1.5 for sample 1 of prompt 7", consequence, "reward.fallback"):
        assert words in warning
    worker, child = pids.read_text().split()
    assert ends(worker) and ends(child)


@pytest.mark.parametrize("by", ["SIGKILL", "SIGSEGV", "memory"])
def test_a_killed_process_costs_its_sample_and_is_replaced(by: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pool = RewardPool(RewardConfig(name=f"{USERS}:ends_on_x", workers=1, timeout_s=20, fallback=-0.5, memory_gb=0.75))
    try:
        scored_group = asyncio.run(pool.score([group("a", "x", "b", "x", metadata={"by": by, "pids": str(pids)})]))[0]
        assert scores(scored_group) == [1.0, -0.5, 1.0, -0.5]
        assert reduce_metrics(pool.metrics()) == counts(calls=4, killed=2, fallbacks=2)
        (warning,) = pool.warnings()
        end = "ran out of memory" if by == "memory" else f"was killed by {by}"
        assert re.match(
            rf"a process of the reward pool {end} \(reward\.memory_gb, .*, is 0\.75\), while it ran ", warning
        )
        for words in ("sample 1 of prompt 7", "it is replaced", "count as -0.5", "reward/killed"):
            assert words in warning
    finally:
        pool.close()
    assert [ends(child) for child in pids.read_text().split()] == [True, True]


def test_processes_are_limited(score: Score) -> None:
    assert scores(score([group("a", rm_type=f"{USERS}:limits")])[0]) == [4.0]


@pytest.mark.parametrize("is_reaped", [False, True])  # by user code that ignores SIGCHLD or waits for any child
def test_an_idle_process_that_was_killed_costs_nothing(pool: RewardPool, score: Score, is_reaped: bool) -> None:
    score([group("4")])
    pool.metrics()
    for worker in pool._idle:  # pyright: ignore[reportPrivateUsage]
        os.kill(worker.pid, signal.SIGKILL)
        os.waitid(os.P_PID, worker.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
    assert scores(score([group("4", "5")])[0]) == [1.0, 0.0]
    assert reduce_metrics(pool.metrics()) == counts(calls=2)


def test_children_of_an_idle_process_that_was_killed_end(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pool = RewardPool(RewardConfig(name=f"{USERS}:starts_child", workers=1, timeout_s=20))
    try:
        with asyncio.Runner() as runner:
            scored_group = group("a", metadata={"pids": str(pids)})
            runner.run(pool.score([scored_group]))
            worker, child = pids.read_text().split()
            os.kill(int(worker), signal.SIGKILL)
            os.waitid(os.P_PID, int(worker), os.WEXITED | os.WNOWAIT)
            runner.run(pool.score([scored_group]))
            assert ends(child)
    finally:
        pool.close()
        for pid in pids.read_text().split()[1::2]:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def test_a_process_that_is_killed_at_every_import_ends_the_run() -> None:
    pool = RewardPool(RewardConfig(name=f"{USERS}:length", workers=1, memory_gb=0.0001))
    try:
        with pytest.raises(RewardError, match=r"could not be imported.*(reward\.memory_gb|exit code)"):
            asyncio.run(pool.score([group("a")]))
    finally:
        pool.close()


def test_a_reward_from_a_generate_function_must_be_finite(score: Score) -> None:
    unscored = group("4", "4")
    samples = (unscored.samples[0], replace(unscored.samples[1], reward=Reward(float("nan"))))
    with pytest.raises(
        RewardError, match=r"sample 1 of group 0 came from rollout\.generate .* the reward nan, not a finite"
    ):
        score([replace(unscored, samples=samples)])


# ---- all samples of a prompt -----------------------------------------------------------------------------------------
def test_a_group_reward_gets_all_samples_to_score(pool: RewardPool, score: Score) -> None:
    unscored = group("aaa", "a", "", "aa", rm_type=f"{USERS}:ranks")
    samples = list(unscored.samples)
    samples[2] = replace(samples[2], status=Status.FAILED)
    pool.metrics()
    assert scores(score([replace(unscored, samples=tuple(samples))])[0]) == [1.0, 0.0, 0.0, 0.5]
    assert reduce_metrics(pool.metrics()) == counts(calls=1)


def test_a_group_reward_must_score_each_sample(score: Score) -> None:
    with pytest.raises(RewardError, match=r"too_few' returned 1 rewards for 2 samples, for the 2 samples of prompt 7"):
        score([group("a", "b", rm_type=f"{USERS}:too_few")])


@pytest.mark.slow
def test_a_timeout_of_a_group_reward_costs_its_group() -> None:
    pool = RewardPool(RewardConfig(name=f"{USERS}:hangs_for_all", workers=1, timeout_s=0.5, fallback=0.25))
    try:
        scored_group = asyncio.run(pool.score([group("a", "b", "c")]))[0]
    finally:
        pool.close()
    assert scores(scored_group) == [0.25] * 3
    assert reduce_metrics(pool.metrics()) == counts(calls=1, timeouts=1, fallbacks=3)


# ---- composition -----------------------------------------------------------------------------------------------------
def test_weighted_rewards_are_summed_and_recorded() -> None:
    weights = {"rm_type": 2.0, f"{USERS}:length": 0.5, f"{USERS}:ranks": -1.0}
    pool = RewardPool(RewardConfig(name="answer", workers=1, weights=weights))
    try:
        scored_groups = asyncio.run(pool.score([group("4", "four"), group("abc", rm_type="dapo")]))
    finally:
        pool.close()
    assert scores(scored_groups[0]) == [2.0 + 0.5 - 0.0, 0.0 + 2.0 - 1.0]
    parts = (("answer", 0.0), (f"{USERS}:length", 4.0), (f"{USERS}:ranks", 1.0))
    assert scored_groups[0].samples[1].reward == Reward(1.0, 0.0, parts)
    assert scored_groups[1].samples[0].reward == Reward(
        -0.5, 0.0, (("dapo", -1.0), (f"{USERS}:length", 3.0), (f"{USERS}:ranks", 0.0))
    )
    metrics = reduce_metrics(group_metrics(scored_groups[:1], 0))
    assert (metrics["rollout/reward/answer"], metrics[f"rollout/reward/{USERS}:length"]) == (0.5, 2.5)
    assert unknown_names(metrics) == []


def test_evaluation_uses_only_the_reward_of_the_row() -> None:
    pool = RewardPool(RewardConfig(name="answer", workers=1, weights={"rm_type": 2.0, f"{USERS}:length": 0.5}))
    try:
        scored_groups = asyncio.run(pool.score([group("4", "5"), group("Answer: 4", rm_type="dapo")], unshaped=True))
    finally:
        pool.close()
    assert [s.reward for g in scored_groups for s in g.samples] == [
        Reward(1.0, 1.0),
        Reward(0.0, 0.0),
        Reward(1.0, 1.0),
    ]


@pytest.mark.slow
def test_a_timeout_of_one_weighted_reward_costs_the_sample() -> None:
    pool = RewardPool(
        RewardConfig(
            workers=1, weights={f"{USERS}:length": 1.0, f"{USERS}:hangs_for_all": 1.0}, timeout_s=0.5, fallback=-1.0
        )
    )
    try:
        scored_group = asyncio.run(pool.score([group("abc")]))[0]
    finally:
        pool.close()
    assert scored_group.samples[0].reward == Reward(-1.0)


def counts(**changes: float) -> dict[str, float]:
    """Return the expected metrics of the pool: zeros except for ``changes``."""
    return dict.fromkeys((f"reward/{name}" for name in COUNTS), 0.0) | {f"reward/{k}": v for k, v in changes.items()}


def ends(pid: str) -> bool:
    """Return whether a process has ended, or ends within 60 s: a signal takes effect when its process is scheduled."""
    try:
        psutil.Process(int(pid)).wait(60)
    except psutil.TimeoutExpired:
        return False
    except psutil.NoSuchProcess:
        return True
    return True


def test_a_stopped_process_blocks_neither_a_long_request_nor_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PIPE_S", 0.3)
    worker = process.WorkerProcess(5.0, 0)
    os.kill(worker.pid, signal.SIGSTOP)
    long = group("9" * 10**7)
    steps: list[int] = []

    async def count_steps() -> None:
        while True:
            steps.append(1)
            await asyncio.sleep(0.005)

    async def call() -> None:
        counting = asyncio.ensure_future(count_steps())
        try:
            await worker.call(ScoreRequest("exact", long.prompt, long.samples), Deadline("pool", "score", 60.0))
        finally:
            counting.cancel()

    try:
        with pytest.raises(DeadlineExceeded, match=r"reward 'exact' \(process \d+\)"):
            asyncio.run(call())
        assert len(steps) > 10, "the event loop waited for the stopped process"
    finally:
        worker.kill()
