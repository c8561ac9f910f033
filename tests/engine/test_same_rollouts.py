"""A rollout that is made again, by another process from what was saved, has the same tokens; seeds of a counter would show."""

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
from tests.engine.conftest import KEY, Engine
from tests.engine.kept import Kept
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
        samples_per_rollout=12,
        first_rollout=first,
        deterministic=False,
        receives_pushes=True,
    )


@pytest.mark.parametrize(("generate", "differs"), [("single_turn", False), ("tests.e2e.custom:counted_seeds", True)])
def test_a_rollout_made_again(engine: Engine, tmp_path: Path, generate: str, differs: bool) -> None:
    characters().save_pretrained(tmp_path / "tokenizer")
    version = engine.run(engine.client.version())

    def manager(first: int) -> RolloutManager:
        client = EngineClient(engine.server.url, admin_key=KEY, name="engine", tp=1, deadline_s=60)
        made = RolloutManager(spec(tmp_path / "tokenizer", generate, first), Counting(extra=4), {}, [Kept(client)])
        engine.run(made.skip_push(version))  # the weights are those that the engine has
        return made

    def collect(side: RolloutManager, rollout_id: int, run: str) -> None:
        path = rollout_path(tmp_path / run / "rollouts", rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_groups(path, engine.run(side.collect(rollout_id)).groups)

    first = manager(0)
    try:
        collect(first, 0, "killed")
        state = engine.run(first.save_state(1, tmp_path / "leftover.npz"))
        collect(first, 1, "killed")
    finally:
        engine.run(first.stop())
    second = manager(1)
    try:
        engine.run(second.load_state(state, tmp_path / "leftover.npz"))
        collect(second, 1, "resumed")
    finally:
        engine.run(second.stop())
    found = sample_differences(tmp_path / "killed", tmp_path / "resumed", (1,))
    if differs:
        assert any(text.endswith(": tokens") for text in found)
        return
    assert [text for text in found if not text.endswith(": logprobs")] == []
    sides = (load_groups(rollout_path(tmp_path / run / "rollouts", 1)) for run in ("killed", "resumed"))
    for mine, theirs in zip(*([s for group in side for s in group.samples] for side in sides), strict=True):
        # In every bit only where run.deterministic, which this is not.
        assert_close(mine.logprobs[-mine.num_response_tokens :], theirs.logprobs[-theirs.num_response_tokens :])
