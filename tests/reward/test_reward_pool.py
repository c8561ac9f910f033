"""The pool: real processes, hung and dying rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.config.rollout import RewardConfig
from slime_like.errors import RewardError
from slime_like.metrics.types import reduce_metrics
from slime_like.reward.pool import RewardPool
from slime_like.types import Reward, SampleGroup, Status
from tests.reward.scored import group, scores

USERS = "tests.reward.rewards_of_users"
Score = Callable[[Sequence[SampleGroup]], list[SampleGroup]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    made = RewardPool(RewardConfig(name="math", workers=2, timeout_s=20))
    yield made
    made.close()


@pytest.fixture(scope="module")
def score(pool: RewardPool) -> Iterator[Score]:
    with asyncio.Runner() as runner:
        yield lambda groups: runner.run(pool.score(groups))


def test_every_sample_is_scored_in_place_by_its_rows_reward(pool: RewardPool, score: Score) -> None:
    groups = [group("4", "5", "4.0"), group("4.0", " 4", rm_type="exact"), group("abc", rm_type=f"{USERS}:length")]
    pool.metrics()
    found = score(groups)
    assert [scores(g) for g in found] == [[1, 0, 1], [0, 1], [3]]
    assert found[0].samples[1].reward == Reward(0.0, 0.0)
    assert groups[0].samples[0].reward is None
    assert [replace(s, reward=None) for s in found[2].samples] == list(groups[2].samples)
    assert reduce_metrics(pool.metrics()) == {"reward/calls": 6, "reward/timeouts": 0}


def test_numpy_numbers_and_rewards_are_numbers(score: Score) -> None:
    assert score([group("a", rm_type=f"{USERS}:shaped")])[0].samples[0].reward == Reward(0.5, 1.0)


def test_workers_import_neither_torch_nor_ray(score: Score) -> None:
    assert scores(score([group("a", "b", rm_type=f"{USERS}:imported_torch")])[0]) == [0.0, 0.0]


def test_scored_and_failed_samples_are_not_asked_about(pool: RewardPool, score: Score) -> None:
    given = group("4", "4", "4")
    samples = (
        replace(given.samples[0], reward=Reward(0.75)),
        replace(given.samples[1], status=Status.FAILED),
        replace(given.samples[2], status=Status.ABORTED),
    )
    pool.metrics()
    assert scores(score([replace(given, samples=samples)])[0]) == [0.75, 0.0, 0.0]
    assert reduce_metrics(pool.metrics())["reward/calls"] == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", r"returned nan, not a finite number, for sample 0 of prompt 7 \(train\); a reward must"),
        ("infinite", r"returned inf, not a finite number"),
        ("text", r"returned '0.5' \(str\), not a number"),
        ("nothing", r"returned None \(NoneType\), not a number"),
        ("raises", r"raised ZeroDivisionError: .+rewards_of_users.py:\d+\), for sample 0 of prompt 7"),
        ("exits", r"its process ended with exit code 3, for sample 0 of prompt 7"),
        ("three_arguments", r"could not be imported in a worker: raised ConfigError"),
    ],
)
def test_a_faulty_reward_ends_the_run_naming_itself(score: Score, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        score([group("a", rm_type=f"{USERS}:{name}")])
    assert f"reward '{USERS}:{name}'" in str(caught.value)
    assert scores(score([group("4", "5", "4")])[0]) == [1, 0, 1]  # the pool is as good as before


def test_a_hung_call_is_killed_with_its_children_and_costs_one_sample(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pool = RewardPool(RewardConfig(name=f"{USERS}:hangs_on_x", workers=1, timeout_s=2))
    try:
        found = asyncio.run(pool.score([group("a", "x", "b", metadata={"pids": str(pids)})]))[0]
    finally:
        pool.close()
    assert scores(found) == [1.0, 0.0, 1.0]
    assert [s.status for s in found.samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert reduce_metrics(pool.metrics()) == {"reward/calls": 3, "reward/timeouts": 1}
    worker, child = pids.read_text().split()
    assert not alive(worker) and not alive(child)


def alive(pid: str) -> bool:
    """Whether a process runs; one that nobody has buried yet does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(") ", 1)[1][0] != "Z"
