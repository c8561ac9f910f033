"""Tolerance for log-probabilities of two float32 forward passes of a test's model."""

from __future__ import annotations

import numpy as np

from slime_like.types import F32

MAX_ERROR, MAX_RMS_ERROR, MIN_TOKENS = 5e-5, 1.5e-5, 8


def assert_close(logprobs: F32, expected: F32, label: str = "") -> None:
    """Assert that two [T] arrays differ by at most ``MAX_ERROR``, and by ``MAX_RMS_ERROR`` in the root mean square."""
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=MAX_ERROR, err_msg=label)
    if len(logprobs) >= MIN_TOKENS:
        rms_error = np.sqrt(np.mean(np.square(np.asarray(logprobs, np.float64) - expected)))
        assert rms_error <= MAX_RMS_ERROR, (
            f"{label} is off by {rms_error:.1e} throughout (root mean square), more than {MAX_RMS_ERROR:.1e}"
        )
