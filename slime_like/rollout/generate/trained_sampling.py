"""Check of sampling settings on the training stream: the trainer computes log-probabilities of the run's distribution."""

from __future__ import annotations

from collections.abc import Mapping

from slime_like.errors import ConfigError
from slime_like.interfaces import Sampling


def deviations(run: Sampling, requested: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """Return name -> (requested, run's value) of settings that would change the distribution; None means the run's value."""
    defaults = {name: getattr(run, name) for name in requested}
    return {
        name: (value, defaults[name])
        for name, value in requested.items()
        if value is not None and value != defaults[name]
    }


def check_generate(run: Sampling, requested: Sampling) -> None:
    """Raise ``ConfigError`` if a generate function requests another distribution than the run's.

    Maximum length and stop tokens may differ.
    """
    settings = {"temperature": requested.temperature, "top_p": requested.top_p, "top_k": requested.top_k}
    for name, (value, run_value) in deviations(run, settings).items():
        raise ConfigError(
            f"rollout.generate asked an engine for {name}={value:g} in training, where the run samples at {name}={run_value:g}: "
            "the trainer would compute log-probabilities of another distribution; make its Sampling by "
            "dataclasses.replace(context.sampling, max_new_tokens=..., stop_token_ids=...)"
            + (f", or set rollout.temperature={value:g}" if name == "temperature" and value > 0 else "")
        )
