"""Validation of scores: finite numbers, small enough for float32 sums."""

from __future__ import annotations

import math
import numbers

from slime_like.types import Reward

MAX_SCORE = 1e9


def validated_reward(score: object, accuracy: object = None) -> Reward:
    """Return the values as a reward.

    Raises ``ValueError`` on a score that is not a number up to ``MAX_SCORE`` in size, or an accuracy outside [0, 1].
    """
    checked_accuracy = None if accuracy is None else _number(accuracy)
    if checked_accuracy is not None and not 0.0 <= checked_accuracy <= 1.0:
        raise ValueError(f"accuracy {checked_accuracy:g}, not a number from 0 to 1")
    number = _number(score)
    if abs(number) > MAX_SCORE:
        raise ValueError(f"{number:g}, not a number from -{MAX_SCORE:g} to {MAX_SCORE:g}")
    return Reward(number, checked_accuracy)


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
