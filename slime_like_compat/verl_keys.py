"""Keys of verl with a counterpart here, and the differences between values: the table of docs/coming_from_verl.md.

``verl_keys.tsv`` has a line per key or group of keys; ``verl.mapping`` translates the keys. Source: ``verl/trainer/config`` of
verl 0.10.0.dev.
"""

from __future__ import annotations

import csv
from pathlib import Path


def _read() -> dict[str, tuple[str, str]]:
    with Path(__file__).with_suffix(".tsv").open(newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {verl: (our_key, "".join(note)) for verl, our_key, *note in rows[1:]}


VERL_KEYS = _read()
"""Key of verl (or several, joined by commas) -> our key, and a note on the values."""
