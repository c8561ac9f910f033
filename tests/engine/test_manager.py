"""Rollout manager on a real engine: over-sampling, pushes, a resume, and errors of user functions."""

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
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.collect.state import in_flight_path
from slime_like.rollout.manager import ManagerSpec, RolloutManager
from slime_like.rollout.pool.probe import TrainerScores, check
from slime_like.rollout.selection import CollectedRollout, GroupSelection, LearningSignal, SelectionSpec
from slime_like.types import F32, SampleGroup, Source, Status
from tests.data.character_tokenizer import characters
from tests.engine.closeness import assert_close
from tests.engine.conftest import VOCAB, Models, RunningEngine, payload
from tests.engine.fixed_engine import FixedEngine
from tests.rollout.counting import Counting

pytestmark = pytest.mark.engine
NUM_SAMPLES, BATCH, NUM_STARTED, MAX_RESPONSE_LEN = 2, 2, 8, 240
EOS = 1  # end of sequence in the model's config
TOLERANCE = 1e-4
STOPS = tuple(range(2, VOCAB, 60))  # one token in sixty ends an answer, so that some groups have equal lengths


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    engine: RunningEngine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


def spec(tokenizer: Path, *, partial: bool, first: int = 0) -> ManagerSpec:
    return ManagerSpec(
        rollout=RolloutConfig(
            batch_size=BATCH,
            n_samples_per_prompt=NUM_SAMPLES,
            max_response_len=MAX_RESPONSE_LEN,
            over_sampling_batch_size=NUM_STARTED,
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
        first_rollout=first,
        deterministic=False,
        receives_pushes=True,
    )


def name_of(version: int) -> str:
    """Return the model of a version: A for even versions, B for odd ones."""
    return "AB"[version % 2]


class ManagerUnderTest:
    """A manager on the shared engine."""

    def __init__(self, engine: RunningEngine, models: Models, manager_spec: ManagerSpec) -> None:
        self.engine, self.models = engine, models
        self.source = Counting(extra=30)
        self.manager = RolloutManager(manager_spec, self.source, {}, [FixedEngine(engine.client)])
        selected = SelectionSpec(BATCH * NUM_SAMPLES, "drop", 99, shuffle=False, seed=3)
        self.selection = GroupSelection(selected, LearningSignal("group"))

    def push(self, version: int) -> None:
        async def push() -> None:
            await self.manager.begin_push()
            await self.engine.client.update_from_tensors(payload(self.models.tensors(name_of(version))))
            await self.manager.commit_push(version)

        self.engine.run(push())

    def probe(self, version: int) -> None:
        """Run the probe after a push, with transformers in place of the trainer."""
        probe_scores = self.engine.run(self.manager.probe())
        trainer = TrainerScores(probe_scores, max_tokens=100_000)
        name, (micro_batch,) = name_of(version), trainer.rows
        sequences = np.split(micro_batch.token_ids, micro_batch.cu_seqlens[1:-1])
        columns = [np.concatenate([[0], self.models.logprobs(name, ids, 1.0)]) for ids in sequences]
        trainer.set_columns([np.concatenate(columns).astype(np.float32)])
        (scores,) = probe_scores
        metrics = reduce_metrics(check(scores, trainer, version, TOLERANCE))
        assert len(scores.continuations) == len(scores.token_ids) > 0
        assert unknown_names(metrics) == []
        # All tokens of a prefix but the last are cache hits; prefixes seldom have fewer than two tokens.
        assert metrics["probe/prefix_cache_hit_rate"] >= 0.5

    def check_that_old_keys_are_seen(self, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Assert that the probe detects a push without a flush, which leaves a KV cache of older weights."""

        async def keep_cache() -> None:
            """Keep the cache."""

        self.probe(version - 1)
        with monkeypatch.context() as fault:
            fault.setattr(self.engine.client, "flush", keep_cache)
            self.push(version)
        with pytest.raises(ConsistencyError, match=rf"after the push of version {version} .* older weights"):
            self.probe(version)

    def collect(self, rollout_id: int) -> CollectedRollout:
        return self.selection.select(rollout_id, [self.engine.run(self.manager.collect(rollout_id))])

    def save(self, next_rollout: int, leftover: Path) -> Mapping[str, Any]:
        return self.engine.run(self.manager.save_state(next_rollout, leftover))

    def stop(self) -> None:
        self.engine.run(self.manager.stop())


def check_logprobs(group: SampleGroup, models: Models) -> None:
    """Assert that each token's logprob is that under the weights of its version."""
    for sample in group.samples:
        by_name: dict[str, F32] = {name: models.logprobs(name, sample.token_ids, 1.0) for name in "AB"}
        for span in sample.spans:
            if span.source is Source.MODEL:
                expected = by_name[name_of(span.version)][span.start - 1 : span.stop - 1]
                assert_close(sample.logprobs[span.start : span.stop], expected)


def test_partial_rollouts_across_pushes_and_a_resume(
    engine: RunningEngine, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    characters().save_pretrained(tmp_path / "tokenizer")
    side = ManagerUnderTest(engine, models, spec(tmp_path / "tokenizer", partial=True))
    leftover = tmp_path / "leftover_2.npz"
    trained_groups: list[SampleGroup] = []
    metrics: list[dict[str, float]] = []
    try:
        for rollout_id in range(5):
            side.push(rollout_id)
            side.probe(rollout_id)
            if rollout_id == 2:  # another manager continues from the saved state
                state = side.save(2, leftover)
                side.stop()
                side = ManagerUnderTest(engine, models, spec(tmp_path / "tokenizer", partial=True, first=2))
                engine.run(side.manager.load_state(state, leftover))
                side.push(rollout_id)
            collected = side.collect(rollout_id)
            assert len(collected.groups) == BATCH
            trained_groups += collected.groups
            completed_samples = [s for g in collected.groups for s in g.samples if s.status is Status.COMPLETED]
            assert all(
                s.token_ids[-1] in (EOS, *STOPS) and s.spans[-1].source is Source.MODEL for s in completed_samples
            )
            metrics.append(reduce_metrics(collected.metrics))
            batch = assemble(
                collected.groups, AssembleSpec(None, "token_mean", 1, 1, 4096, MAX_RESPONSE_LEN), rollout_id
            )
            (micro_batch,) = batch.steps[0].micro_batches[0]
            sampled = micro_batch.loss_weight > 0
            assert ((micro_batch.versions >= 0) == sampled).all()
            assert set(micro_batch.versions[sampled].tolist()) <= set(range(rollout_id + 1))
        in_flight = side.save(5, tmp_path / "leftover_5.npz")["in_flight"]
        side.check_that_old_keys_are_seen(5, monkeypatch)
    finally:
        side.stop()
    assert in_flight_path(leftover).exists()
    for group in trained_groups:
        check_logprobs(group, models)
    assert any(len(set(sample.versions)) > 1 for group in trained_groups for sample in group.samples)
    ids = [group.prompt.prompt_id for group in trained_groups]
    assert len(set(ids)) == len(ids)
    num_dropped = sum(rollout_metrics["rollout/dropped_groups/nonzero_std"] for rollout_metrics in metrics)
    assert len(trained_groups) + num_dropped + in_flight == side.source.state()["taken"]
    assert all(rollout_metrics["rollout/wasted_tokens"] == 0 for rollout_metrics in metrics)
    assert unknown_names(metrics[0]) == []


def test_without_partial_rollouts_every_token_is_of_the_newest_weights(
    engine: RunningEngine, models: Models, tmp_path: Path
) -> None:
    characters().save_pretrained(tmp_path)
    side = ManagerUnderTest(engine, models, spec(tmp_path, partial=False))
    num_prompts = 0
    try:
        for rollout_id in range(2):
            side.push(rollout_id)
            collected = side.collect(rollout_id)
            assert {v for group in collected.groups for s in group.samples for v in s.versions} == {rollout_id}
            for group in collected.groups:
                check_logprobs(group, models)
            num_dropped = reduce_metrics(collected.metrics)["rollout/dropped_groups/nonzero_std"]
            num_prompts += len(collected.groups) + int(num_dropped)
        num_in_flight = side.save(2, tmp_path / "leftover_2.npz")["in_flight"]
    finally:
        side.stop()
    assert num_prompts + num_in_flight == side.source.state()["taken"]


def test_user_functions_that_fail_or_drop_every_group_are_named(
    engine: RunningEngine, models: Models, tmp_path: Path
) -> None:
    characters().save_pretrained(tmp_path)
    base_spec = spec(tmp_path, partial=False)
    short_rollout = replace(
        base_spec.rollout, over_sampling_batch_size=None, max_refills=0, max_response_len=2, generate="single_turn"
    )

    def first_rollout(**changes: Any) -> CollectedRollout:
        side = ManagerUnderTest(engine, models, replace(base_spec, rollout=replace(short_rollout, **changes)))
        try:
            side.push(0)
            return side.collect(0)
        finally:
            side.stop()

    collected = first_rollout(filters=["tests.engine.failing_functions:drop_all"])
    rollout_metrics = reduce_metrics(collected.metrics)
    assert rollout_metrics["rollout/kv_capacity_tokens"] == 4096
    assert 0 < rollout_metrics["rollout/kv_usage"] <= 1
    assert rollout_metrics["rollout/running_requests_max"] >= 1
    assert rollout_metrics["rollout/retractions"] == 0
    assert collected.groups == () and rollout_metrics["rollout/empty_in_a_row"] == 1
    assert rollout_metrics["rollout/dropped_groups/tests.engine.failing_functions:drop_all/never good"] == BATCH
    assert "rollout/generated/raw_reward" in rollout_metrics and unknown_names(rollout_metrics) == []
    assert [str(w).split(";")[0] for w in collected.warnings] == ["rollout 0 is empty: nothing is trained on"]
    assert "tests.engine.failing_functions:drop_all dropped 2 (never good)" in collected.warnings[0].text
    assert "with label" in collected.warnings[0].example
    for changes, pattern in (
        (
            {"filters": ["tests.engine.failing_functions:keep_by_true"]},
            "keep_by_true returned True .bool. for the group of prompt",
        ),
        (
            {"generate": "tests.engine.failing_functions:return_nothing"},
            "return_nothing returned None .NoneType. for prompt .*must return the samples",
        ),
        (
            {"generate": "tests.engine.failing_functions:raise_error"},
            r"raise_error raised ValueError: no tool \(.*failing_functions.py:\d+\), for prompt",
        ),
        (
            {"generate": "tests.engine.failing_functions:number_groups"},
            r"number_groups for prompt .* has group_id 10\d: give it context.group_id",
        ),
        (
            {"generate": "tests.engine.failing_functions:forget_versions"},
            "forget_versions for prompt .* has sampled tokens of weight version -1",
        ),
    ):
        with pytest.raises(UserCodeError, match=pattern):
            first_rollout(**{"filters": [], **changes})
