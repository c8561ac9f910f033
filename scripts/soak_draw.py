"""Random choice of faults for the next part of a soak; the kinds that were injected least often are drawn first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slime_like.config.schema.faults import FATAL, RECOVERED, WORKERS, Fault

SURVIVED = (*RECOVERED, *WORKERS)
STARTING = "signals_at_start"
FINAL_FAULTS = (*FATAL, STARTING)
PHASES = {"collect": 0.25, "step": 0.1, "push": 0.1}  # phase of a fault -> its duration on an idle machine (s)
LAYOUTS = (  # layouts that may alternate between parts of one run
    ("one engine", ()),
    ("two engines", ("rollout.num_engines=2",)),
    ("two engines, broadcast", ("rollout.num_engines=2", "placement.mode=split")),
)


@dataclass(frozen=True, slots=True)
class DrawnFaults:
    """Faults and layout of one part of the run, with the layout's overrides. ``end``: fault that ends the part, "" for none."""

    layout: str
    overrides: tuple[str, ...]
    end: str
    faults: tuple[Fault, ...]


def draw_part(
    rng: random.Random, rollouts: range, max_faults: int, ends: Mapping[str, int], num_by_kind: Mapping[str, int]
) -> DrawnFaults:
    """Draw the next part, over the remaining ``rollouts``, with up to ``max_faults`` faults; with 0, it is undisturbed.

    ``ends``: number of earlier parts by their final fault. ``num_by_kind``: number of earlier faults by kind.
    """
    layout, overrides = rng.choice(LAYOUTS)
    end = _least(rng, FINAL_FAULTS, ends) if max_faults else ""
    if end == STARTING:
        return DrawnFaults(layout, overrides, end, ())
    # Rollouts between two faults. With one engine, no rollout ends before the engine serves again.
    spacing = (1, 2) if layout == "one engine" else (3, 9)
    rollout, last = rollouts.start, rollouts.stop - 1
    counts, faults = Counter(num_by_kind), list[Fault]()
    for _ in range(max_faults - 1):
        if rollout >= last:
            break
        kind = _least(rng, SURVIVED, counts)
        counts[kind] += 1
        faults.append(_fault(rng, kind, rollout))
        rollout += rng.randint(*spacing)
    if end:
        faults.append(_fault(rng, end, min(rollout, last)))
    return DrawnFaults(layout, overrides, end, tuple(faults))


def _least(rng: random.Random, kinds: Sequence[str], counts: Mapping[str, int]) -> str:
    """Choose at random among those of ``kinds`` that have the lowest count."""
    lowest = min(counts.get(kind, 0) for kind in kinds)
    return rng.choice([kind for kind in kinds if counts.get(kind, 0) == lowest])


def _fault(rng: random.Random, kind: str, rollout: int) -> Fault:
    phase = rng.choice(list(PHASES))
    return Fault(kind, phase, rollout, round(rng.uniform(0, PHASES[phase]), 3))
