"""Closeness of log-probabilities by two float32 forwards of a test's model."""

from __future__ import annotations

import numpy as np

from slime_like.types import F32

MOST, THROUGHOUT, ENOUGH = 5e-5, 1.5e-5, 8


def assert_close(found: F32, expected: F32, of: str = "") -> None:
    """[T] each: no token differs by more than rounding may, nor do all of them by as much as rounding does now and then."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=MOST, err_msg=of)
    if len(found) >= ENOUGH:
        off = np.sqrt(np.mean(np.square(np.asarray(found, np.float64) - expected)))
        assert off <= THROUGHOUT, f"{of} is off by {off:.1e} throughout (root mean square), more than {THROUGHOUT:.1e}"
