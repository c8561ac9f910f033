"""How close log-probabilities by two float32 forwards of a test's model come.

Measured on the models of ``conftest``, 96 000 tokens sampled at 1.0 and as many at 0.7, transformers in float32 against
float64: 1e-6 in the median, 2.4e-5 at most, and over 8 to 96 tokens of one answer a root mean square of at most 9e-6 (of
8) to 3e-6 (of 96). Of two forwards each may be as far off. So no single token tells a fault of 1e-5 from rounding, but
what is off by as much throughout is a fault.
"""

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
