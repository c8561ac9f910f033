"""Token table of a rollout: batch columns independent of packing; damaged files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_like.algo.advantage import grpo
from slime_like.batch import PackedBatch
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.token_table import (
    MAX_SAMPLES,
    choose_samples,
    load_table,
    save_table,
    token_table,
    with_advantages,
)
from slime_like.errors import DataError
from slime_like.types import SampleGroup
from tests.data.test_dump import group


def with_unique_ids(source: SampleGroup) -> SampleGroup:
    """Return the group with sample ids that are unique in the rollout."""
    samples = [replace(s, sample_id=10 * source.group_id + i, extras={}) for i, s in enumerate(source.samples)]
    return replace(source, samples=tuple(samples))


GROUPS = [with_unique_ids(group(g, [3, 5, 2, 7])) for g in range(6)]


def chosen_rows(dp: int = 1, steps: int = 1, budget: int = 4096, *, advantage: bool = True) -> PackedBatch | None:
    spec = AssembleSpec(grpo if advantage else None, "token_mean", steps, dp, 32, 16)
    return choose_samples(assemble(GROUPS, spec, 0), GROUPS, budget)


def test_best_and_worst_of_the_first_groups() -> None:
    rows = chosen_rows()
    assert rows is not None and len(rows.sample_ids) == MAX_SAMPLES
    assert [(int(i) // 10, int(i) % 2) for i in rows.sample_ids] == [(g, kind) for g in range(4) for kind in (1, 0)]
    assert rows.advantages is not None
    assert np.all((rows.advantages > 0) == (rows.sample_ids % 2 == 1)), "every second sample is right"


@pytest.mark.parametrize(("dp", "steps"), [(2, 1), (1, 3), (2, 2)])
def test_the_view_does_not_depend_on_the_layout(dp: int, steps: int) -> None:
    reference, distributed = chosen_rows(), chosen_rows(dp, steps)
    assert reference is not None and distributed is not None
    for name in ("token_ids", "cu_seqlens", "versions", "rollout_logprobs", "sample_ids", "advantages"):
        np.testing.assert_array_equal(getattr(reference, name), getattr(distributed, name))


def test_the_token_budget_holds() -> None:
    rows = chosen_rows(budget=20)
    assert rows is not None and len(rows.token_ids) <= 20
    assert chosen_rows(budget=1) is None


def test_unknown_values_are_nan() -> None:
    rows = chosen_rows(advantage=False)
    assert rows is not None
    view = token_table(rows, np.arange(len(rows.token_ids), dtype=np.float32), 4)
    assert np.isnan(view.advantages).all(), "advantages are computed on the ranks"
    assert np.isnan(view.trainer_logprobs[view.cu_seqlens[:-1]]).all(), "nothing predicts a first token"
    assert np.array_equal(np.isnan(view.rollout_logprobs), view.versions < 0)


def test_advantages_of_the_ranks_are_added_to_the_view() -> None:
    rows = chosen_rows(advantage=False)
    assert rows is not None
    view = token_table(rows, np.zeros(len(rows.token_ids), dtype=np.float32), 4)
    first, second = view.sequence(0), view.sequence(1)
    column = np.arange(first.stop, dtype=np.float32)
    wrong_length = np.zeros(second.stop - second.start + 1, dtype=np.float32)
    updated_view = with_advantages(
        view, {int(view.sample_ids[0]): column, int(view.sample_ids[1]): wrong_length, 999: column}
    )
    is_trained = view.loss_weight[first] > 0
    assert is_trained.any() and not is_trained.all()
    np.testing.assert_array_equal(updated_view.advantages[first], np.where(is_trained, column, np.nan))
    assert np.isnan(updated_view.advantages[second.start :]).all(), "a column of a different length is ignored"
    assert np.isnan(view.advantages).all(), "the original view is not modified"


def test_a_saved_view_is_loaded_unchanged(tmp_path: Path) -> None:
    rows = chosen_rows()
    assert rows is not None
    view = token_table(rows, np.zeros(len(rows.token_ids), dtype=np.float32), 4)
    save_table(tmp_path / "a" / "tokens.npz", view)
    loaded_view = load_table(tmp_path / "a" / "tokens.npz")
    assert loaded_view.version == 4
    for name in ("token_ids", "advantages", "loss_weight", "trainer_logprobs"):
        np.testing.assert_array_equal(getattr(loaded_view, name), getattr(view, name))
    np.savez(tmp_path / "b.npz", format=np.array(1), version=np.array(1))
    content = (tmp_path / "a" / "tokens.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(content[: len(content) // 2])
    for name in ("b.npz", "c.npz", "none.npz"):
        with pytest.raises(DataError, match=name):
            load_table(tmp_path / name)
