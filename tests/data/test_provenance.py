"""Selection of tokens for the comparison of sample log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slime_like.data.provenance import provenance
from tests.train.models import make_rows


def test_a_sample_counts_completely_or_not_at_all() -> None:
    rows = make_rows([4, 3, 5, 2, 3], 0)
    # On-policy; on-policy; started by version 6 (mixed); started by version 5 (stale); on-policy with a tool turn (-1).
    versions = [-1, 7, 7, 7, -1, 7, 7, -1, 6, 6, 7, 7, -1, 5, 7, -1, 7]
    tokens = provenance(replace(rows, versions=np.array(versions, np.int32)), 7)
    assert np.flatnonzero(tokens.on_policy).tolist() == [1, 2, 3, 5, 6, 14, 16]
    assert np.flatnonzero(tokens.mixed).tolist() == [10, 11]
    assert np.flatnonzero(tokens.stale).tolist() == [8, 9, 13]
    assert tokens.sampled.tolist() == [version >= 0 for version in versions]


def test_rows_without_sequences_have_nothing_to_compare() -> None:
    assert not provenance(make_rows([], 0), 7).sampled.any()
