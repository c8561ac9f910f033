"""Rules for ``rollout.agent``, a coroutine function.

It is required if ``rollout.generate`` runs an agent, else rejected.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.config.schema.unused_keys import refuse_unused_keys
from slime_like.errors import ConfigError
from slime_like.registry import check_path, resolve
from slime_like.util.user_code import check_signature, location

OPENAI_AGENT = "openai_agent"  # a name registered in GENERATE
KEYS = ("agent", "agent_deadline_s", "agent_concurrency")
AGENT_SIGNATURE = "async def agent(base_url, api_key, prompt, metadata) -> float | None"


def check_agent(config: RolloutConfig) -> None:
    """Raise ``ConfigError`` if ``rollout.generate`` runs an agent and ``rollout.agent`` is missing or not an import path.

    If it runs no agent, it is an error to change one of ``KEYS``, which only agents read. The agent is not imported:
    ``agent_function`` does that.
    """
    if config.generate != OPENAI_AGENT:
        setting, fix = f"rollout.generate={config.generate}", f"rollout.generate={OPENAI_AGENT}"
        refuse_unused_keys("rollout.", config, KEYS, setting, fix)
        return
    if config.agent is None:
        raise ConfigError(
            f"rollout.generate={OPENAI_AGENT} runs an agent: set rollout.agent=my_package.my_module:function, {AGENT_SIGNATURE}"
        )
    check_path("rollout.agent", config.agent)


def agent_function(path: str) -> Any:
    """Return the agent function with the import path ``path``.

    Raises ``ConfigError`` if the function cannot be imported or cannot be called as an agent.
    """
    check_path("rollout.agent", path)
    function = resolve("rollout.agent", path, {})
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"rollout.agent={path!r} is not a coroutine function: it must be {AGENT_SIGNATURE}; wrap blocking calls in "
            f"asyncio.to_thread{location(function)}"
        )
    check_signature("rollout.agent", path, function, AGENT_SIGNATURE, 4)
    return function
