"""One check of sampling settings on the training stream: the trainer computes log-probabilities of the run's distribution."""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.errors import ConfigError
from slime_like.interfaces import Sampling


def deviations(run: Sampling, asked: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """Name -> (asked value, the run's) of settings that would change the distribution; None leaves a setting to the run."""
    own = {name: getattr(run, name) for name in asked}
    return {name: (value, own[name]) for name, value in asked.items() if value is not None and value != own[name]}


def check_generate(run: Sampling, asked: Sampling) -> None:
    """Raise ``ConfigError`` where a generate function asks for another distribution than the run's.

    How long an answer may get and which tokens end it are free.
    """
    settings = {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}
    for name, (value, own) in deviations(run, settings).items():
        raise ConfigError(
            f"rollout.generate asked an engine for {name}={value:g} in training, where the run samples at {name}={own:g}: "
            "the trainer would compute log-probabilities of another distribution; make its Sampling by "
            "dataclasses.replace(context.sampling, max_new_tokens=..., stop_token_ids=...)"
            + (f", or set rollout.temperature={value:g}" if name == "temperature" and value > 0 else "")
        )
