"""A rollout manager on a real engine: over-sampling, pushes between rollouts, and a resume in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.errors import ConsistencyError, UserCodeError
from slime_like.metrics.dictionary import unknown
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.collect.state import in_flight_path
from slime_like.rollout.manager import CollectedRollout, ManagerSpec, RolloutManager
from slime_like.rollout.pool.probe import TrainerScores, check
from slime_like.types import F32, SampleGroup, Source, Status
from tests.data.character_tokenizer import characters
from tests.engine.closeness import assert_close
from tests.engine.conftest import VOCAB, Engine, Models, payload
from tests.engine.kept import Kept
from tests.rollout.counting import Counting

pytestmark = pytest.mark.engine
N, BATCH, BEGUN, LONGEST = 2, 2, 8, 240
EOS = 1  # of the model's config
TOLERANCE = 1e-4
STOPS = tuple(range(2, VOCAB, 60))  # one token in sixty ends a short answer: some groups end with equal lengths


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    engine: Engine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


def spec(tokenizer: Path, *, partial: bool, first: int = 0) -> ManagerSpec:
    return ManagerSpec(
        rollout=RolloutConfig(
            batch_size=BATCH,
            n_samples_per_prompt=N,
            max_response_len=LONGEST,
            over_sampling_batch_size=BEGUN,
            partial_rollout=partial,
            generate="tests.engine.lengths:long_for_odd_prompts",
            filters=["nonzero_std"],
            max_refills=50,
        ),
        reward=RewardConfig(name="given", workers=1),
        evaluation=EvalConfig(),
        loop=LoopConfig(num_rollout=99),
        health=HealthConfig(on_dead_engine="stop", on_stalled_engine="stop"),
        tokenizer_path=str(tokenizer),
        max_context_len=512,
        stop_token_ids=STOPS,
        chat_template_kwargs={},
        temperature=1.0,
        seed=3,
        probe_sequences=2,
        samples_per_rollout=BATCH * N,
        first_rollout=first,
        deterministic=False,
        receives_pushes=True,
    )


def name_of(version: int) -> str:
    """Version 0 is A, 1 is B, 2 is A ..."""
    return "AB"[version % 2]


class Side:
    """A manager on the shared engine."""

    def __init__(self, engine: Engine, models: Models, given: ManagerSpec) -> None:
        self.engine, self.models = engine, models
        self.source = Counting(extra=30)
        self.manager = RolloutManager(given, self.source, {}, [Kept(engine.client)])

    def push(self, version: int) -> None:
        async def push() -> None:
            await self.manager.begin_push()
            await self.engine.client.update_from_tensors(payload(self.models.tensors(name_of(version))))
            await self.manager.commit_push(version)

        self.engine.run(push())

    def probe(self, version: int) -> None:
        """The gate after a push, with transformers for a trainer."""
        found = self.engine.run(self.manager.probe())
        trainer = TrainerScores(found, max_tokens=100_000)
        name, (rows,) = name_of(version), trainer.rows
        sequences = np.split(rows.token_ids, rows.cu_seqlens[1:-1])
        columns = [np.concatenate([[0], self.models.logprobs(name, ids, 1.0)]) for ids in sequences]
        trainer.set_columns([np.concatenate(columns).astype(np.float32)])
        (scores,) = found
        metrics = reduce_metrics(check(scores, trainer, version, TOLERANCE))
        assert len(scores.continuations) == len(scores.token_ids) > 0
        assert unknown(metrics) == []
        # All but the last token of each beginning; a prompt or an answer is seldom shorter than two tokens.
        assert metrics["probe/prefix_cache_hit_rate"] >= 0.5

    def check_that_old_keys_are_seen(self, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A push that flushes nothing leaves keys and values of older weights, which scores do not read."""

        async def nothing() -> None:
            """Flush nothing."""

        self.probe(version - 1)
        with monkeypatch.context() as fault:
            fault.setattr(self.engine.client, "flush", nothing)
            self.push(version)
        with pytest.raises(ConsistencyError, match=rf"after the push of version {version} .* older weights"):
            self.probe(version)

    def collect(self, rollout_id: int) -> CollectedRollout:
        return self.engine.run(self.manager.collect(rollout_id))

    def save(self, next_rollout: int, leftover: Path) -> Mapping[str, Any]:
        return self.engine.run(self.manager.save_state(next_rollout, leftover))

    def stop(self) -> None:
        self.engine.run(self.manager.stop())


def check_logprobs(group: SampleGroup, models: Models) -> None:
    """Each token's log-probability is that of the weights whose version it carries."""
    for sample in group.samples:
        by_name: dict[str, F32] = {name: models.logprobs(name, sample.token_ids, 1.0) for name in "AB"}
        for span in sample.spans:
            if span.source is Source.MODEL:
                expected = by_name[name_of(span.version)][span.start - 1 : span.stop - 1]
                assert_close(sample.logprobs[span.start : span.stop], expected)


def test_partial_rollouts_across_pushes_and_a_resume(
    engine: Engine, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    characters().save_pretrained(tmp_path / "tokenizer")
    side = Side(engine, models, spec(tmp_path / "tokenizer", partial=True))
    leftover = tmp_path / "leftover_2.npz"
    trained: list[SampleGroup] = []
    metrics: list[dict[str, float]] = []
    try:
        for rollout_id in range(5):
            side.push(rollout_id)
            side.probe(rollout_id)
            if rollout_id == 2:  # another process goes on from what was saved
                state = side.save(2, leftover)
                side.stop()
                side = Side(engine, models, spec(tmp_path / "tokenizer", partial=True, first=2))
                engine.run(side.manager.load_state(state, leftover))
                side.push(rollout_id)
            collected = side.collect(rollout_id)
            assert len(collected.groups) == BATCH
            trained += collected.groups
            ended = [s for g in collected.groups for s in g.samples if s.status is Status.COMPLETED]
            assert all(s.token_ids[-1] in (EOS, *STOPS) and s.spans[-1].source is Source.MODEL for s in ended)
            metrics.append(reduce_metrics(collected.metrics))
            batch = assemble(collected.groups, AssembleSpec(None, "token_mean", 1, 1, 4096, LONGEST), rollout_id)
            (rows,) = batch.steps[0].micro_batches[0]
            sampled = rows.loss_weight > 0
            assert ((rows.versions >= 0) == sampled).all()
            assert set(rows.versions[sampled].tolist()) <= set(range(rollout_id + 1))
        in_flight = side.save(5, tmp_path / "leftover_5.npz")["in_flight"]
        side.check_that_old_keys_are_seen(5, monkeypatch)
    finally:
        side.stop()
    assert in_flight_path(leftover).exists()
    for group in trained:
        check_logprobs(group, models)
    assert any(len(set(sample.versions)) > 1 for group in trained for sample in group.samples)
    ids = [group.prompt.prompt_id for group in trained]
    assert len(set(ids)) == len(ids)
    dropped = sum(found["rollout/dropped_groups/nonzero_std"] for found in metrics)
    assert len(trained) + dropped + in_flight == side.source.state()["taken"]
    assert all(found["rollout/wasted_tokens"] == 0 for found in metrics)
    assert unknown(metrics[0]) == []


def test_without_partial_rollouts_every_token_is_of_the_newest_weights(
    engine: Engine, models: Models, tmp_path: Path
) -> None:
    characters().save_pretrained(tmp_path)
    side = Side(engine, models, spec(tmp_path, partial=False))
    places = 0
    try:
        for rollout_id in range(2):
            side.push(rollout_id)
            collected = side.collect(rollout_id)
            assert {v for group in collected.groups for s in group.samples for v in s.versions} == {rollout_id}
            for group in collected.groups:
                check_logprobs(group, models)
            dropped = reduce_metrics(collected.metrics)["rollout/dropped_groups/nonzero_std"]
            places += len(collected.groups) + int(dropped)
        returned = side.save(2, tmp_path / "leftover_2.npz")["in_flight"]
    finally:
        side.stop()
    assert places + returned == side.source.state()["taken"]


def test_functions_of_users_that_fail_or_drop_everything_are_named(
    engine: Engine, models: Models, tmp_path: Path
) -> None:
    characters().save_pretrained(tmp_path)
    plain = spec(tmp_path, partial=False)
    short = replace(
        plain.rollout, over_sampling_batch_size=None, max_refills=0, max_response_len=2, generate="single_turn"
    )

    def first_rollout(**changes: Any) -> CollectedRollout:
        side = Side(engine, models, replace(plain, rollout=replace(short, **changes)))
        try:
            side.push(0)
            return side.collect(0)
        finally:
            side.stop()

    collected = first_rollout(filters=["tests.engine.failing:drop"])
    found = reduce_metrics(collected.metrics)
    assert collected.groups == () and found["rollout/empty_in_a_row"] == 1
    assert found["rollout/dropped_groups/tests.engine.failing:drop/never good"] == BATCH
    assert "rollout/generated/raw_reward" in found and unknown(found) == []
    assert [str(w).split(";")[0] for w in collected.warnings] == ["rollout 0 is empty: nothing is trained on"]
    assert "tests.engine.failing:drop dropped 2 (never good)" in collected.warnings[0].text
    assert "with label" in collected.warnings[0].example
    for changes, words in (
        (
            {"filters": ["tests.engine.failing:keep_by_true"]},
            "keep_by_true returned True .bool. for the group of prompt",
        ),
        (
            {"generate": "tests.engine.failing:nothing"},
            "nothing returned None .NoneType. for prompt .*must return the samples",
        ),
        (
            {"generate": "tests.engine.failing:raises"},
            r"raises raised ValueError: no tool \(.*failing.py:\d+\), for prompt",
        ),
    ):
        with pytest.raises(UserCodeError, match=words):
            first_rollout(**{"filters": [], **changes})
