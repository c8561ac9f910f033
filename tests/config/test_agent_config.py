"""rollout.agent: refused at load if nothing would run it, or if it cannot be run."""

from __future__ import annotations

import re

import pytest

from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError
from tests.config.bad_input import message

AGENT = "tests.engine.agents:three_turns"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.agent=" + AGENT], r"rollout\.agent='tests.*has no effect with rollout\.generate=single_turn"),
        (["rollout.agent_concurrency=8"], r"rollout\.agent_concurrency=8 has no effect with rollout\.generate=single"),
        (["rollout.agent_deadline_s=9"], r"rollout\.agent_deadline_s=9\S* has no effect"),
        (["rollout.generate=openai_agent"], r"rollout\.generate=openai_agent runs an agent: set rollout\.agent="),
        (["rollout.generate=openai_agent", "rollout.agent=nothing"], r"rollout\.agent='nothing' is not a path"),
        (["rollout.generate=openai_agent", "rollout.agent=no.such:agent"], r"cannot import 'no.such'"),
        (["rollout.generate=openai_agent", "rollout.agent=tests.engine.agents:blocks"], "is not a coroutine function"),
        (["rollout.generate=openai_agent", f"rollout.agent={AGENT}", "rollout.agent_concurrency=0"], "must be above 0"),
    ],
)
def test_an_unusable_agent_is_refused_at_load(overrides: list[str], words: str) -> None:
    assert re.search(words, message(["+recipe=quickstart", *overrides], "", files=False))


def test_an_agent_is_imported_only_with_code() -> None:
    argv = ["+recipe=quickstart", "rollout.generate=openai_agent"]
    cfg = load_config([*argv, "rollout.agent=no.such:agent"], files=False, code=False)
    assert cfg.rollout.agent == "no.such:agent"
    with pytest.raises(ConfigError, match=r"rollout\.agent='nothing' is not a path"):
        load_config([*argv, "rollout.agent=nothing"], files=False, code=False)
