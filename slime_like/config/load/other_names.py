"""Lookup of this project's key from a name that verl, slime or another project uses for it."""

from __future__ import annotations

import functools
from collections import defaultdict

from slime_like.config.load.compat import OTHER_KEYS, SWITCHES, VALUES, VERL_KEYS
from slime_like.config.schema.known import free_keys

AMBIGUOUS = ("enable", "len", "metric", "name", "path", "type")  # last words of verl's keys that say too little


def our_key(key: str) -> str | None:
    """Return our key for the unknown ``key``; None if there is none, or if several would fit.

    ``key`` may be a key of verl, such as ``algorithm.lam`` for our ``algo.lambd``, or one of ``OTHER_KEYS``. It may also be the
    group of our key followed by a foreign name: the last word of a verl key, as in ``algo.lam``, or the name of a slime flag.
    A key of ours whose value is a mapping is never returned, because the value of ``key`` is not a mapping.
    """
    return _our_keys().get(key)


@functools.cache
def _our_keys() -> dict[str, str]:
    our_names: dict[str, set[str]] = defaultdict(set)
    for names, (ours, _) in VERL_KEYS.items():
        for name in map(str.strip, names.split(",")):
            our_names[name].add(ours)
            if (word := name.rpartition(".")[2]) not in AMBIGUOUS:
                our_names[_in_group(ours, word)].add(ours)
    for flag, (ours, _) in (VALUES | SWITCHES).items():
        our_names[_in_group(ours, flag.removeprefix("--").replace("-", "_"))].add(ours)
    all_names = {name: min(keys) for name, keys in our_names.items() if len(keys) == 1} | OTHER_KEYS
    return {name: ours for name, ours in all_names.items() if ours not in free_keys()}


def _in_group(key: str, word: str) -> str:
    """Return ``word`` as the name of a key in the group of ``key``."""
    return f"{key.rpartition('.')[0]}.{word}"
