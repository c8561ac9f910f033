"""A rollout that another manager repeats from a saved state has the same tokens; other seeds are detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.data.dump import load_groups, rollout_path, save_groups
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.manager import ManagerSpec, RolloutManager
from tests.data.character_tokenizer import characters
from tests.e2e.same_run import sample_differences
from tests.engine.closeness import assert_close
from tests.engine.conftest import ADMIN_KEY, RunningEngine
from tests.engine.fixed_engine import FixedEngine
from tests.rollout.counting import Counting

pytestmark = pytest.mark.engine


def spec(tokenizer: Path, generate: str, first: int) -> ManagerSpec:
    return ManagerSpec(
        rollout=RolloutConfig(batch_size=3, n_samples_per_prompt=4, max_response_len=12, generate=generate),
        reward=RewardConfig(name="tests.e2e.custom:digits", workers=1),
        evaluation=EvalConfig(),
        loop=LoopConfig(num_rollout=9),
        health=HealthConfig(on_dead_engine="stop", on_stalled_engine="stop"),
        tokenizer_path=str(tokenizer),
        max_context_len=128,
        stop_token_ids=(1,),
        chat_template_kwargs={},
        temperature=1.0,
        seed=3,
        probe_sequences=0,
        first_rollout=first,
        deterministic=False,
        receives_pushes=True,
    )


@pytest.mark.parametrize(
    ("generate", "differs"), [("single_turn", False), ("tests.e2e.custom:draw_process_seeds", True)]
)
def test_a_repeated_rollout_has_the_same_tokens_unless_its_seeds_differ(
    engine: RunningEngine, tmp_path: Path, generate: str, differs: bool
) -> None:
    characters().save_pretrained(tmp_path / "tokenizer")
    version = engine.run(engine.client.version())

    def manager(first: int) -> RolloutManager:
        client = EngineClient(engine.server.url, admin_key=ADMIN_KEY, name="engine", tp=1, deadline_s=60)
        manager_of_run = RolloutManager(
            spec(tmp_path / "tokenizer", generate, first), Counting(extra=4), {}, [FixedEngine(client)]
        )
        engine.run(manager_of_run.skip_push(version))  # the weights are those that the engine has
        return manager_of_run

    def collect(manager_of_run: RolloutManager, rollout_id: int, run: str) -> None:
        path = rollout_path(tmp_path / run / "rollouts", rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_groups(path, engine.run(manager_of_run.collect(rollout_id)).groups)

    first_manager = manager(0)
    try:
        collect(first_manager, 0, "killed")
        state = engine.run(first_manager.save_state(1, tmp_path / "leftover.npz"))
        collect(first_manager, 1, "killed")
    finally:
        engine.run(first_manager.stop())
    resumed_manager = manager(1)
    try:
        engine.run(resumed_manager.load_state(state, tmp_path / "leftover.npz"))
        collect(resumed_manager, 1, "resumed")
    finally:
        engine.run(resumed_manager.stop())
    differences = sample_differences(tmp_path / "resumed", (1,), reference=tmp_path / "killed")
    if differs:
        assert any(text.endswith(": tokens") for text in differences)
        return
    assert [text for text in differences if not text.endswith(": logprobs")] == []
    groups_of_runs = (load_groups(rollout_path(tmp_path / run / "rollouts", 1)) for run in ("resumed", "killed"))
    for actual, expected in zip(
        *([s for group in groups for s in group.samples] for groups in groups_of_runs), strict=True
    ):
        # Equal in every bit only with run.deterministic=true.
        assert_close(actual.logprobs[-actual.num_response_tokens :], expected.logprobs[-expected.num_response_tokens :])
