"""Seeds of a request, and a check of its sampling settings.

A sample's seed depends only on the run's seed, the stream and the sample id, so a resumed run draws the same seeds. On the
training stream the settings must be those of the run, because the trainer computes log-probabilities under them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from slime_like.errors import ConfigError
from slime_like.interfaces import Sampling

MAX_SEED = 2**31 - 1


def sample_seeds(run_seed: int, stream: str, first_sample_id: int, num_samples: int) -> list[int]:
    """Return a seed in ``[0, 2**31 - 1)`` for each of ``num_samples`` samples of ``stream``, from ``first_sample_id`` on.

    ``stream`` is "train", or names a held-out dataset.
    """
    tag = zlib.crc32(stream.encode())
    return [
        int(np.random.SeedSequence([run_seed, tag, first_sample_id + i]).generate_state(1, np.uint32)[0]) % MAX_SEED
        for i in range(num_samples)
    ]


def turn_seed(sample_seed: int, turn: int) -> int:
    """Return the seed of request ``turn`` of a sample. It depends on ``turn``, as requests may start from the same tokens."""
    return int(np.random.SeedSequence([sample_seed, turn]).generate_state(1, np.uint32)[0]) % MAX_SEED


def deviations(run: Sampling, requested: Mapping[str, float | None]) -> dict[str, tuple[float, float]]:
    """Return a dict from name to (requested, run's value) of settings that differ. None requests the run's value."""
    defaults = {name: getattr(run, name) for name in requested}
    return {
        name: (value, defaults[name])
        for name, value in requested.items()
        if value is not None and value != defaults[name]
    }


def check_generate(run: Sampling, requested: Sampling) -> None:
    """Raise ``ConfigError`` if a generate function requests a distribution other than the run's.

    Maximum length and stop tokens may differ.
    """
    settings = {"temperature": requested.temperature, "top_p": requested.top_p, "top_k": requested.top_k}
    for name, (value, run_value) in deviations(run, settings).items():
        raise ConfigError(
            f"rollout.generate sends requests with {name}={value:g} in training, where the run samples at {name}={run_value:g}: "
            "the trainer would compute log-probabilities of another distribution; create its Sampling with "
            "dataclasses.replace(context.sampling, max_new_tokens=..., stop_token_ids=...)"
            + (f", or set rollout.temperature={value:g}" if name == "temperature" and value > 0 else "")
        )
