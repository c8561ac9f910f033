"""Tables of the tokens of a few samples: log-probabilities of engine and trainer, loss weights and advantages.

With ``run.dump_rollouts`` the driver writes at most one table per rollout, ``tokens_<id>.npz``, next to the rollout's
groups. The trainer computes its log-probabilities before the first optimizer step of that rollout. A ``TokenTable`` is a
record for the report; ``algo_interfaces.TokenView`` is the input of a token advantage on the trainer ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from slime_like.batch import PackedBatch, TrainBatch
from slime_like.data.assemble import FILLER_ID
from slime_like.data.dump import check_digest, write_columns
from slime_like.types import F32, I32, I64, Reward, SampleGroup
from slime_like.util.reading import InputFile, abbreviate, reason

FORMAT = 1
MAX_SAMPLES = 8
DTYPES = {
    "sample_ids": np.int64,
    **dict.fromkeys(("cu_seqlens", "token_ids", "versions"), np.int32),
    **dict.fromkeys(("rollout_logprobs", "trainer_logprobs", "loss_weight", "advantages"), np.float32),
}
"""Dtypes of a table's columns."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Table of S sequences with T tokens in total. ``[T]`` columns are aligned with tokens, as in ``PackedBatch``."""

    version: int  # version of the weights that computed trainer_logprobs
    sample_ids: I64  # [S]
    cu_seqlens: I32  # [S + 1]
    token_ids: I32  # [T]
    versions: I32  # [T], weight version that sampled the token, -1 if not sampled
    rollout_logprobs: F32  # [T], nan if not sampled
    trainer_logprobs: F32  # [T], nan at a sequence's first token
    loss_weight: F32  # [T], 0 if not trained
    advantages: F32  # [T], nan if not trained or not computed yet

    def __post_init__(self) -> None:
        num_tokens = int(self.cu_seqlens[-1])
        for item in fields(self)[3:]:
            assert getattr(self, item.name).shape == (num_tokens,), f"{item.name} for {num_tokens} tokens"

    def sequence(self, index: int) -> slice:
        """Return the slice of sequence ``index`` in the columns."""
        return slice(int(self.cu_seqlens[index]), int(self.cu_seqlens[index + 1]))


def table_path(folder: Path, rollout_id: int) -> Path:
    """Return the file of a rollout's table in a folder of dumps."""
    return folder / f"tokens_{rollout_id:07d}.npz"


def choose_samples(batch: TrainBatch, groups: Sequence[SampleGroup], max_tokens: int) -> PackedBatch | None:
    """Return the best and worst samples of the first groups as one micro-batch.

    It contains at most ``MAX_SAMPLES`` samples and ``max_tokens`` tokens. Samples that are not in ``batch`` or do not
    fit are skipped. The result is None if no sample remains.
    """
    places = {
        int(sample_id): (micro_batch, index)
        for step in batch.steps
        for rank in step.micro_batches
        for micro_batch in rank
        for index, sample_id in enumerate(micro_batch.sample_ids)
        if int(sample_id) != FILLER_ID
    }
    chosen_sequences: list[tuple[PackedBatch, int]] = []
    remaining_tokens = max_tokens
    for sample_id in _candidates(groups):
        if sample_id not in places or len(chosen_sequences) == MAX_SAMPLES:
            continue
        micro_batch, index = places[sample_id]
        length = int(micro_batch.cu_seqlens[index + 1] - micro_batch.cu_seqlens[index])
        if length <= remaining_tokens:
            chosen_sequences.append((micro_batch, index))
            remaining_tokens -= length
    return _pack(chosen_sequences) if chosen_sequences else None


def token_table(batch: PackedBatch, trainer_logprobs_T: F32, version: int) -> TokenTable:
    """Return the table of the sequences in ``batch``.

    ``trainer_logprobs_T`` are the trainer's log-probabilities, computed with its weights of ``version``.
    """
    lengths = np.diff(batch.cu_seqlens)
    first = np.zeros(len(batch.token_ids), dtype=bool)
    first[batch.cu_seqlens[:-1]] = True
    per_sequence = np.full(len(lengths), np.nan, dtype=np.float32) if batch.advantages is None else batch.advantages
    nan = np.float32(np.nan)
    return TokenTable(
        version=version,
        sample_ids=batch.sample_ids,
        cu_seqlens=batch.cu_seqlens,
        token_ids=batch.token_ids,
        versions=batch.versions,
        rollout_logprobs=np.where(batch.versions >= 0, batch.rollout_logprobs, nan).astype(np.float32),
        trainer_logprobs=np.where(first, nan, trainer_logprobs_T).astype(np.float32),
        loss_weight=batch.loss_weight,
        advantages=np.where(batch.loss_weight > 0, np.repeat(per_sequence, lengths), nan).astype(np.float32),
    )


def with_advantages(table: TokenTable, new_advantages: Mapping[int, F32]) -> TokenTable:
    """Return the table with the ranks' ``new_advantages`` ([L] by sample id); untrained tokens keep nan.

    Samples that are not in ``new_advantages``, or have another length there, keep their advantages.
    """
    advantages = table.advantages.copy()
    for index, sample_id in enumerate(table.sample_ids):
        span = table.sequence(index)
        column = new_advantages.get(int(sample_id))
        if column is not None and len(column) == span.stop - span.start:
            advantages[span] = np.where(table.loss_weight[span] > 0, column, np.float32(np.nan))
    return replace(table, advantages=advantages)


def save_table(path: Path, table: TokenTable) -> None:
    """Write ``table`` to ``path`` atomically. Raises ``OSError`` if the file cannot be written."""
    columns = {item.name: np.asarray(getattr(table, item.name)) for item in fields(table)} | {
        "format": np.array(FORMAT)
    }
    write_columns(path, columns)


def load_table(path: Path) -> TokenTable:
    """Read a file of ``save_table``. Raises ``DataError`` naming the file if it is missing, damaged or of another format."""
    file = InputFile(path, fix="dump it again")
    columns = file.arrays()
    try:
        if str(columns["format"]) != str(FORMAT):
            raise ValueError(f"format {abbreviate(columns['format'])}, this version reads {FORMAT}")
        arrays = {item.name: columns[item.name] for item in fields(TokenTable)}
        table = TokenTable(version=int(arrays.pop("version")), **arrays)
        for name, dtype in DTYPES.items():
            if arrays[name].dtype != dtype or arrays[name].ndim != 1:
                raise ValueError(f"{name} is {arrays[name].dtype}{list(arrays[name].shape)}, not {np.dtype(dtype)}[]")
        edges = table.cu_seqlens
        if len(edges) != len(table.sample_ids) + 1 or edges[0] != 0 or (np.diff(edges) < 0).any():
            raise ValueError("cu_seqlens does not match its number of sequences")
        if (table.token_ids < 0).any():
            raise ValueError("token_ids contains a number that is not a token")
        check_digest(columns)
        return table
    except (ValueError, KeyError, IndexError, TypeError, AssertionError) as error:
        raise file.refused(f"is not a table of a rollout's tokens ({reason(error)})") from error


def _candidates(groups: Sequence[SampleGroup]) -> Iterator[int]:
    """Yield the ids of the best and the worst sample of each group; unscored samples count as 0."""
    for group in groups:
        ordered_samples = sorted(group.samples, key=lambda s: -_score(s.reward))
        yield from dict.fromkeys(sample.sample_id for sample in (*ordered_samples[:1], *ordered_samples[-1:]))


def _score(reward: Reward | None) -> float:
    return 0.0 if reward is None else reward.score


def _pack(chosen_sequences: Sequence[tuple[PackedBatch, int]]) -> PackedBatch:
    """Pack the chosen sequences of several micro-batches into one."""
    places = [
        (batch, slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])), i) for batch, i in chosen_sequences
    ]
    lengths = [span.stop - span.start for _, span, _ in places]
    advantages = [batch.advantages[i] for batch, _, i in places if batch.advantages is not None]
    names = sorted(set.intersection(*(set(batch.extras) for batch, _, _ in places)))
    return PackedBatch(
        token_ids=np.concatenate([batch.token_ids[span] for batch, span, _ in places]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_weight=np.concatenate([batch.loss_weight[span] for batch, span, _ in places]),
        versions=np.concatenate([batch.versions[span] for batch, span, _ in places]),
        rollout_logprobs=np.concatenate([batch.rollout_logprobs[span] for batch, span, _ in places]),
        rewards=np.array([batch.rewards[i] for batch, _, i in places], dtype=np.float32),
        advantages=np.array(advantages, dtype=np.float32) if len(advantages) == len(places) else None,
        sample_ids=np.array([batch.sample_ids[i] for batch, _, i in places], dtype=np.int64),
        extras={name: np.concatenate([batch.extras[name][span] for batch, span, _ in places]) for name in names},
    )
