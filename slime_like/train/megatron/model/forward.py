"""Packed rows through the pipeline: micro-batches on the device, megatron's schedules, and scores without gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from slime_like.batch import PackedBatch
from slime_like.errors import DataError
from slime_like.train.megatron.model.layers import PackedRows
from slime_like.train.megatron.model.layout import TokenLayout, attention_pieces, token_layout, tokens_by_rank
from slime_like.train.megatron.model.model import Chunks
from slime_like.train.megatron.model.sdpa import attention_batches
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util import exact


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on this rank. Score columns are F32 [T] on the device, filled on the last pipeline stage."""

    rows: PackedBatch
    layout: TokenLayout
    input_ids: Tensor  # I64 [1, L]
    packed: PackedRows
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None  # the critic's, before its update
    returns: Tensor | None = None  # what the critic is to learn
    advantages: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How hidden states become log-probabilities."""

    temperature: float
    chunk: int  # tokens per chunk of the vocabulary projection


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of a host array on ``device``."""
    return torch.from_numpy(np.array(values)).to(device, non_blocking=True)


def check_tokens(rows: PackedBatch, vocab_size: int, source: Path) -> None:
    """Raise ``DataError`` on a token that the model of ``source`` does not have: scores of it would mean nothing."""
    tokens = rows.token_ids
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise DataError(
            f"token id {bad} is outside the vocabulary of {vocab_size} that {source} states: "
            "tokenizer and model do not belong together"
        )


def make_micro(rows: PackedBatch, place: RankInfo) -> MicroBatch:
    """Lay out one micro-batch and move its tokens to the device."""
    sizes = place.layout
    layout = token_layout(rows.cu_seqlens, tp=sizes.tp, cp=sizes.cp, cp_rank=place.cp_rank, least=exact.ROWS)
    bounds = torch.from_numpy(layout.padded_cu_seqlens)
    pieces = attention_pieces(layout.padded_cu_seqlens, cp=sizes.cp, cp_rank=place.cp_rank)
    longest = int(np.diff(layout.padded_cu_seqlens).max())
    query_cu = to_device(pieces.query_cu, place.device)
    by_rank = None if sizes.cp == 1 else tokens_by_rank(layout.padded_cu_seqlens, sizes.cp)
    padding = layout.row_index < 0
    if sizes.sequence_parallel:
        padding = np.split(padding, sizes.tp)[place.tp_rank]
    packed = PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pieces=pieces,
        batches=attention_batches(layout.padded_cu_seqlens, place.device) if sizes.cp == 1 else None,
        query_cu=query_cu,
        key_cu=to_device(pieces.key_cu, place.device),
        key_index=None if pieces.key_index is None else to_device(pieces.key_index, place.device),
        sequence_cu=query_cu if sizes.cp == 1 else to_device(layout.padded_cu_seqlens, place.device),
        position_ids=to_device(layout.position_ids, place.device),
        by_rank=None if by_rank is None else to_device(by_rank, place.device),
        in_order=None if by_rank is None else to_device(np.argsort(by_rank), place.device),
        padding=to_device(padding, place.device)[None],
    )
    ids = layout.take(rows.token_ids, 0).astype(np.int64)
    return MicroBatch(rows, layout, to_device(ids, place.device)[None], packed)


def run_schedule(wrapped: Chunks, micros: Sequence[MicroBatch], after: Callable[..., Any], *, train: bool) -> list[Any]:
    """Every micro-batch through megatron's schedule; ``after(micro, hidden)`` runs on the last stage.

    train: ``after`` returns megatron's (loss, count, report) and gradients are accumulated and reduced. Otherwise it
    returns anything, and the list of what it returned comes back (empty on other stages).
    """
    blanks = _blanks(wrapped, micros)
    count = len(blanks) + len(micros)

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(batches)
        hidden = model(micro.input_ids, micro.packed)
        return hidden, _nothing_after if any(micro is blank for blank in blanks) else partial(after, micro)

    out = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter([*blanks, *micros]) for _ in wrapped],
        model=list(wrapped),
        num_microbatches=count,
        seq_length=1,  # shapes travel with the tensors: variable_seq_lengths
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return out[len(blanks) :]


def _blanks(wrapped: Chunks, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Micro-batches of padding that fill up to what the interleaved schedule asks for: a multiple of its group.

    They come first: the last micro-batch of a step is the one whose backward reduces gradients.
    """
    if len(wrapped) == 1 or not micros:
        return []
    group = int(
        wrapped.last.config.microbatch_group_size_per_vp_stage or wrapped.last.config.pipeline_model_parallel_size
    )
    blank = make_micro(_no_sequences(micros[0].rows), wrapped.last.place)
    return [blank] * (-len(micros) % group)


def _no_sequences(rows: PackedBatch) -> PackedBatch:
    """Rows with the columns of ``rows`` and nothing in them."""
    columns = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    empty: dict[str, Any] = {
        name: value[:0] for name, value in columns.items() if isinstance(value, np.ndarray) and name != "cu_seqlens"
    }
    return dataclasses.replace(rows, **empty, cu_seqlens=np.zeros(1, np.int32), extras={})


def _nothing_after(hidden: Tensor, non_loss_data: bool = False) -> Any:
    """Neither loss nor tokens, but a backward pass that the other stages can wait for."""
    if non_loss_data:
        return None
    return hidden.sum() * 0.0, torch.zeros((), dtype=torch.int32, device=hidden.device), {}


@torch.no_grad()
def score_micros(
    wrapped: Chunks, micros: Sequence[MicroBatch], masks: Sequence[npt.NDArray[np.bool_]], scoring: Scoring
) -> list[Tensor]:
    """F32 [T] log-probabilities per micro-batch at its masked tokens, 0 elsewhere; empty but on the last stage.

    Columns are whole on every context parallel rank.
    """
    mask_of = {id(micro): mask for micro, mask in zip(micros, masks, strict=True)}
    model = wrapped.last

    def after(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
        found = micro.layout.predictions(mask_of[id(micro)])
        ids = micro.rows.token_ids[found.target].astype(np.int64)
        logprobs, _ = model.scores(
            hidden,
            to_device(found.source, hidden.device),
            to_device(ids, hidden.device),
            temperature=scoring.temperature,
            chunk=scoring.chunk,
            entropy=False,
        )
        out = torch.zeros(micro.layout.num_tokens, device=hidden.device)
        out[to_device(found.target, hidden.device)] = logprobs
        return out

    wrapped.eval()  # nothing is recomputed where nothing is differentiated
    try:
        return sum_columns(run_schedule(wrapped, micros, after, train=False), model.cp_group)
    finally:
        wrapped.train()


def sum_columns(columns: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Sums over the ranks of ``group``, in one collective: exact where each entry is 0 on all ranks but one."""
    if not columns or group.size() == 1:
        return list(columns)
    joined = torch.cat(list(columns))
    dist.all_reduce(joined, group=group)
    return list(joined.split([len(column) for column in columns]))
