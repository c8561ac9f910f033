"""Sampling seeds. A sample's seed depends only on the run's seed and the sample id, so a resumed run draws the same ones."""

from __future__ import annotations

import zlib

import numpy as np

MAX_SEED = 2**31 - 1


def sample_seeds(run_seed: int, stream: str, first_sample_id: int, n: int) -> list[int]:
    """Return ``n`` seeds in ``[0, 2**31 - 1)`` for samples ``first_sample_id ...`` of a named stream (train, or a dataset)."""
    tag = zlib.crc32(stream.encode())
    return [
        int(np.random.SeedSequence([run_seed, tag, first_sample_id + i]).generate_state(1, np.uint32)[0]) % MAX_SEED
        for i in range(n)
    ]


def turn_seed(sample_seed: int, turn: int) -> int:
    """Return the seed of request ``turn`` of a sample whose requests may start from the same tokens."""
    return int(np.random.SeedSequence([sample_seed, turn]).generate_state(1, np.uint32)[0]) % MAX_SEED
