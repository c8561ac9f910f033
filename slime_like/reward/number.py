"""A score as it enters training: a finite number, of a size that float32 holds with room for sums."""

from __future__ import annotations

import math
import numbers

from slime_like.types import Reward

LARGEST = 1e9


def checked(score: object, accuracy: object = None) -> Reward:
    """Return the reward. Raises ``ValueError`` on a score beyond ``LARGEST`` or an accuracy that is not within 0 and 1."""
    found = None if accuracy is None else _number(accuracy)
    if found is not None and not 0.0 <= found <= 1.0:
        raise ValueError(f"accuracy {found:g}, not a number from 0 to 1")
    number = _number(score)
    if abs(number) > LARGEST:
        raise ValueError(f"{number:g}, not a number from -{LARGEST:g} to {LARGEST:g}")
    return Reward(number, found)


def _number(value: object) -> float:
    if not isinstance(value, numbers.Real):  # numpy's scalars count, its arrays and torch's tensors do not
        raise ValueError(f"{value!r:.80} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer or fraction beyond all floats
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return number
