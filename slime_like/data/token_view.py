"""Per-token tables of a few sequences: log-probabilities of engine and trainer, loss weights and advantages.

``run.dump_rollouts`` writes one next to each rollout's groups: ``tokens_<id>.npz``, without pickled objects. The trainer's
log-probabilities are those of the weights that the rollout is about to train, before the first optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from slime_like.batch import PackedBatch, TrainBatch
from slime_like.data.assemble import FILLER_ID
from slime_like.data.dump import DIGEST, check_digest, digest
from slime_like.types import F32, I32, I64, Reward, SampleGroup
from slime_like.util.reading import InputFile, reason, shown

FORMAT = 1
MOST = 8
DTYPES = {
    "sample_ids": np.int64,
    **dict.fromkeys(("cu_seqlens", "token_ids", "versions"), np.int32),
    **dict.fromkeys(("rollout_logprobs", "trainer_logprobs", "loss_weight", "advantages"), np.float32),
}
"""Dtypes of a view's columns."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Table of S sequences with T tokens in total. ``[T]`` columns are aligned with tokens, as in ``PackedBatch``."""

    version: int  # of the trainer that scored them
    sample_ids: I64  # [S]
    cu_seqlens: I32  # [S + 1]
    token_ids: I32  # [T]
    versions: I32  # [T], weight version that sampled the token, -1 where not sampled
    rollout_logprobs: F32  # [T], nan where not sampled
    trainer_logprobs: F32  # [T], nan at a sequence's first token
    loss_weight: F32  # [T], 0 where not trained
    advantages: F32  # [T], nan where not trained or not computed yet

    def __post_init__(self) -> None:
        count = int(self.cu_seqlens[-1])
        for item in fields(self)[3:]:
            assert getattr(self, item.name).shape == (count,), f"{item.name} for {count} tokens"

    def sequence(self, index: int) -> slice:
        """Return the slice of sequence ``index`` in the columns."""
        return slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))


def view_path(folder: Path, rollout_id: int) -> Path:
    """Return the file of a rollout's view in a folder of dumps."""
    return folder / f"tokens_{rollout_id:07d}.npz"


def choose(batch: TrainBatch, groups: Sequence[SampleGroup], max_tokens: int) -> PackedBatch | None:
    """Return the best and worst samples of the first groups, up to ``MOST`` and ``max_tokens``, as one packed row.

    None if the batch trains on none of them.
    """
    places = {
        int(sample_id): (rows, index)
        for step in batch.steps
        for rank in step.rows
        for rows in rank
        for index, sample_id in enumerate(rows.sample_ids)
        if int(sample_id) != FILLER_ID
    }
    chosen: list[tuple[PackedBatch, int]] = []
    remaining_tokens = max_tokens
    for sample_id in _candidates(groups):
        if sample_id not in places or len(chosen) == MOST:
            continue
        rows, index = places[sample_id]
        length = int(rows.cu_seqlens[index + 1] - rows.cu_seqlens[index])
        if length <= remaining_tokens:
            chosen.append((rows, index))
            remaining_tokens -= length
    return _packed(chosen) if chosen else None


def token_view(rows: PackedBatch, trainer_logprobs_T: F32, version: int) -> TokenTable:
    """Return the view of packed ``rows`` scored by the trainer at ``version``."""
    lengths = np.diff(rows.cu_seqlens)
    first = np.zeros(len(rows.token_ids), dtype=bool)
    first[rows.cu_seqlens[:-1]] = True
    per_sequence = np.full(len(lengths), np.nan, dtype=np.float32) if rows.advantages is None else rows.advantages
    nan = np.float32(np.nan)
    return TokenTable(
        version=version,
        sample_ids=rows.sample_ids,
        cu_seqlens=rows.cu_seqlens,
        token_ids=rows.token_ids,
        versions=rows.versions,
        rollout_logprobs=np.where(rows.versions >= 0, rows.rollout_logprobs, nan).astype(np.float32),
        trainer_logprobs=np.where(first, nan, trainer_logprobs_T).astype(np.float32),
        loss_weight=rows.loss_weight,
        advantages=np.where(rows.loss_weight > 0, np.repeat(per_sequence, lengths), nan).astype(np.float32),
    )


def with_advantages(view: TokenTable, new_advantages: Mapping[int, F32]) -> TokenTable:
    """Return the view with the ranks' ``new_advantages`` (sample id -> [L]); untrained tokens stay nan."""
    advantages = view.advantages.copy()
    for index, sample_id in enumerate(view.sample_ids):
        span = view.sequence(index)
        column = new_advantages.get(int(sample_id))
        if column is not None and len(column) == span.stop - span.start:
            advantages[span] = np.where(view.loss_weight[span] > 0, column, np.float32(np.nan))
    return replace(view, advantages=advantages)


def save_view(path: Path, view: TokenTable) -> None:
    """Write ``view`` to ``path`` atomically."""
    columns = {item.name: np.asarray(getattr(view, item.name)) for item in fields(view)} | {"format": np.array(FORMAT)}
    columns[DIGEST] = np.array(digest(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **columns)
    partial.replace(path)


def load_view(path: Path) -> TokenTable:
    """Read a file of ``save_view``. Raises ``DataError`` naming the file."""
    file = InputFile(path, fix="dump it again")
    columns = file.arrays()
    try:
        if str(columns["format"]) != str(FORMAT):
            raise ValueError(f"format {shown(columns['format'])}, this version reads {FORMAT}")
        arrays = {item.name: columns[item.name] for item in fields(TokenTable)}
        view = TokenTable(version=int(arrays.pop("version")), **arrays)
        for name, dtype in DTYPES.items():
            if arrays[name].dtype != dtype or arrays[name].ndim != 1:
                raise ValueError(f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}, not {np.dtype(dtype)}[]")
        edges = view.cu_seqlens
        if len(edges) != len(view.sample_ids) + 1 or edges[0] != 0 or (np.diff(edges) < 0).any():
            raise ValueError("cu_seqlens does not match its number of sequences")
        if (view.token_ids < 0).any():
            raise ValueError("token_ids contains a number that is not a token")
        check_digest(columns)
        return view
    except (ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
        raise file.refused(f"is not a view of a rollout's tokens ({reason(error)})") from error


def _candidates(groups: Sequence[SampleGroup]) -> Iterator[int]:
    """Yield the ids of the best and the worst sample of each group; unscored samples count as 0."""
    for group in groups:
        ordered = sorted(group.samples, key=lambda s: -_score(s.reward))
        yield from dict.fromkeys(sample.sample_id for sample in (*ordered[:1], *ordered[-1:]))


def _score(reward: Reward | None) -> float:
    return 0.0 if reward is None else reward.score


def _packed(chosen: Sequence[tuple[PackedBatch, int]]) -> PackedBatch:
    """Pack the chosen sequences of several rows into one row."""
    places = [(rows, slice(int(rows.cu_seqlens[i]), int(rows.cu_seqlens[i + 1])), i) for rows, i in chosen]
    lengths = [span.stop - span.start for _, span, _ in places]
    advantages = [rows.advantages[i] for rows, _, i in places if rows.advantages is not None]
    names = sorted(set.intersection(*(set(rows.extras) for rows, _, _ in places)))
    return PackedBatch(
        token_ids=np.concatenate([rows.token_ids[span] for rows, span, _ in places]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.concatenate([rows.loss_weight[span] for rows, span, _ in places]),
        versions=np.concatenate([rows.versions[span] for rows, span, _ in places]),
        rollout_logprobs=np.concatenate([rows.rollout_logprobs[span] for rows, span, _ in places]),
        rewards=np.array([rows.rewards[i] for rows, _, i in places], dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32) if len(advantages) == len(places) else None,
        sample_ids=np.array([rows.sample_ids[i] for rows, _, i in places], dtype=np.int64),
        extras={name: np.concatenate([rows.extras[name][span] for rows, span, _ in places]) for name in names},
    )
