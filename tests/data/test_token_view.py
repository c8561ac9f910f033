"""A rollout's view of tokens: columns of the batch, whatever its packing; whole on disk or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slime_like.algo.advantage import grpo
from slime_like.batch import PackedBatch
from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.token_view import MOST, choose, load_view, save_view, token_view, with_advantages
from slime_like.errors import DataError
from slime_like.types import SampleGroup
from tests.data.test_dump import group


def named_apart(found: SampleGroup) -> SampleGroup:
    """The group with sample ids that no other group has, as the rollout gives them."""
    samples = [replace(s, sample_id=10 * found.group_id + i, extras={}) for i, s in enumerate(found.samples)]
    return replace(found, samples=tuple(samples))


GROUPS = [named_apart(group(g, [3, 5, 2, 7])) for g in range(6)]


def chosen(dp: int = 1, steps: int = 1, budget: int = 4096, *, advantage: bool = True) -> PackedBatch | None:
    spec = AssembleSpec(grpo if advantage else None, "token_mean", steps, dp, 32, 16)
    return choose(assemble(GROUPS, spec, 0), GROUPS, budget)


def test_best_and_worst_of_the_first_groups() -> None:
    rows = chosen()
    assert rows is not None and len(rows.sample_ids) == MOST
    assert [(int(i) // 10, int(i) % 2) for i in rows.sample_ids] == [(g, kind) for g in range(4) for kind in (1, 0)]
    assert rows.advantages is not None
    assert np.all((rows.advantages > 0) == (rows.sample_ids % 2 == 1)), "every other sample is right"


@pytest.mark.parametrize(("dp", "steps"), [(2, 1), (1, 3), (2, 2)])
def test_it_does_not_depend_on_the_layout(dp: int, steps: int) -> None:
    one, other = chosen(), chosen(dp, steps)
    assert one is not None and other is not None
    for name in ("token_ids", "cu_seqlens", "versions", "rollout_logprobs", "sample_ids", "advantages"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_the_token_budget_holds() -> None:
    rows = chosen(budget=20)
    assert rows is not None and len(rows.token_ids) <= 20
    assert chosen(budget=1) is None


def test_what_is_not_known_is_nan() -> None:
    rows = chosen(advantage=False)
    assert rows is not None
    view = token_view(rows, np.arange(len(rows.token_ids), dtype=np.float32), 4)
    assert np.isnan(view.advantages).all(), "computed on the ranks"
    assert np.isnan(view.trainer_logprobs[view.cu_seqlens[:-1]]).all(), "nothing predicts a first token"
    assert np.array_equal(np.isnan(view.rollout_logprobs), view.versions < 0)


def test_advantages_of_the_ranks_are_put_beside_their_tokens() -> None:
    rows = chosen(advantage=False)
    assert rows is not None
    view = token_view(rows, np.zeros(len(rows.token_ids), dtype=np.float32), 4)
    first, second = view.sequence(0), view.sequence(1)
    column = np.arange(first.stop, dtype=np.float32)
    wrong = np.zeros(second.stop - second.start + 1, dtype=np.float32)
    found = with_advantages(view, {int(view.sample_ids[0]): column, int(view.sample_ids[1]): wrong, 999: column})
    trained = view.loss_weight[first] > 0
    assert trained.any() and not trained.all()
    np.testing.assert_array_equal(found.advantages[first], np.where(trained, column, np.nan))
    assert np.isnan(found.advantages[second.start :]).all(), "of another length: not of this sequence"
    assert np.isnan(view.advantages).all(), "the view itself is left as it is"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = chosen()
    assert rows is not None
    view = token_view(rows, np.zeros(len(rows.token_ids), dtype=np.float32), 4)
    save_view(tmp_path / "a" / "tokens.npz", view)
    again = load_view(tmp_path / "a" / "tokens.npz")
    assert again.version == 4
    for name in ("token_ids", "advantages", "loss_weight", "trainer_logprobs"):
        np.testing.assert_array_equal(getattr(again, name), getattr(view, name))
    np.savez(tmp_path / "b.npz", format=np.array(1), version=np.array(1))
    whole = (tmp_path / "a" / "tokens.npz").read_bytes()
    (tmp_path / "c.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("b.npz", "c.npz", "none.npz"):
        with pytest.raises(DataError, match=name):
            load_view(tmp_path / name)
