"""Forward passes of packed sequences: micro-batches on the device, megatron's schedules, and scores without gradients."""

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
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.util import batch_invariant


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch on this rank.

    The fields ``old_logprobs`` to ``advantages`` are set only on the last pipeline stage: F32 [T] on the device.
    """

    batch: PackedBatch
    layout: TokenLayout
    input_ids: Tensor  # I64 [1, L]
    packed: PackedRows
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    values: Tensor | None = None  # the critic's, before its update
    returns: Tensor | None = None  # the critic's targets
    advantages: Tensor | None = None
    experts: Tensor | None = (
        None  # [routers of this rank, L, experts per token], to be replayed; L / tp with sequence parallelism
    )


@dataclass(frozen=True, slots=True)
class LogprobSettings:
    """Settings for computing log-probabilities from hidden states."""

    temperature: float
    chunk: int  # tokens per chunk of the vocabulary projection


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy a host array to ``device``."""
    return torch.from_numpy(np.array(values)).to(device, non_blocking=True)


def check_tokens(batch: PackedBatch, vocab_size: int, source: Path) -> None:
    """Raise ``DataError`` if a token id is outside ``[0, vocab_size)``. ``source`` is the file that states the size."""
    tokens = batch.token_ids
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        raise DataError(
            f"token id {outside[0]} is outside the vocabulary of {vocab_size} tokens in {source}: "
            "use the tokenizer of this model"
        )


def make_micro(batch: PackedBatch, rank_info: RankInfo) -> MicroBatch:
    """Lay out one micro-batch and move its tokens to the device."""
    sizes = rank_info.layout
    layout = token_layout(
        batch.cu_seqlens, tp=sizes.tp, cp=sizes.cp, cp_rank=rank_info.cp_rank, min_tokens=batch_invariant.ROWS
    )
    bounds = torch.from_numpy(layout.padded_cu_seqlens)
    pieces = attention_pieces(layout.padded_cu_seqlens, cp=sizes.cp, cp_rank=rank_info.cp_rank)
    max_length = int(np.diff(layout.padded_cu_seqlens).max())
    query_cu = to_device(pieces.query_cu, rank_info.device)
    by_rank = None if sizes.cp == 1 else tokens_by_rank(layout.padded_cu_seqlens, sizes.cp)
    padding = layout.token_index < 0
    if sizes.sequence_parallel:
        padding = np.split(padding, sizes.tp)[rank_info.tp_rank]
    packed = PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
        pieces=pieces,
        query_cu=query_cu,
        key_cu=to_device(pieces.key_cu, rank_info.device),
        key_index=None if pieces.key_index is None else to_device(pieces.key_index, rank_info.device),
        sequence_cu=query_cu if sizes.cp == 1 else to_device(layout.padded_cu_seqlens, rank_info.device),
        position_ids=to_device(layout.position_ids, rank_info.device),
        by_rank=None if by_rank is None else to_device(by_rank, rank_info.device),
        in_order=None if by_rank is None else to_device(np.argsort(by_rank), rank_info.device),
        padding=to_device(padding, rank_info.device)[None],
    )
    ids = layout.take(batch.token_ids, 0).astype(np.int64)
    return MicroBatch(batch, layout, to_device(ids, rank_info.device)[None], packed)


def run_schedule(
    wrapped: ModelSegments, micros: Sequence[MicroBatch], on_output: Callable[..., Any], *, train: bool
) -> list[Any]:
    """Run every micro-batch through megatron's schedule, and call ``on_output(micro, hidden)`` on the last stage.

    With ``train``, ``on_output`` returns megatron's (loss, count, report); gradients are accumulated and reduced, and the list
    of reports is returned. Without ``train``, ``on_output`` is also passed ``non_loss_data=True``, and the list of its results
    is returned. On stages before the last, the list is empty. Collective.
    """
    padding = _padding_micros(wrapped, micros)
    num_micros = len(padding) + len(micros)

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        micro = next(batches)
        hidden = model(micro.input_ids, micro.packed)
        return hidden, _zero_loss if any(micro is pad for pad in padding) else partial(on_output, micro)

    out = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter([*padding, *micros]) for _ in wrapped],
        model=list(wrapped),
        num_microbatches=num_micros,
        seq_length=1,  # shapes are sent with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )
    return out[len(padding) :]


def _padding_micros(wrapped: ModelSegments, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return empty micro-batches that make the number of micro-batches a multiple of the interleaved schedule's group size.

    The list is empty without virtual stages. Empty micro-batches must run first: with overlap_grad_reduce, gradients are reduced
    in the backward pass of the last micro-batch, and an empty one does not use the output layer.
    """
    if len(wrapped) == 1 or not micros:
        return []
    group = int(
        wrapped.last.config.microbatch_group_size_per_vp_stage or wrapped.last.config.pipeline_model_parallel_size
    )
    empty = make_micro(_no_sequences(micros[0].batch), wrapped.last.rank_info)
    return [empty] * (-len(micros) % group)


def _no_sequences(batch: PackedBatch) -> PackedBatch:
    """Return an empty batch with the columns of ``batch`` except ``extras``."""
    columns = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    empty: dict[str, Any] = {
        name: value[:0] for name, value in columns.items() if isinstance(value, np.ndarray) and name != "cu_seqlens"
    }
    return dataclasses.replace(batch, **empty, cu_seqlens=np.zeros(1, np.int32), extras={})


def _zero_loss(hidden: Tensor, non_loss_data: bool = False) -> Any:
    """Return a loss of zero over no tokens, so that every stage runs the backward pass; return None when scoring."""
    if non_loss_data:
        return None
    return hidden.sum() * 0.0, torch.zeros((), dtype=torch.int32, device=hidden.device), {}


@torch.no_grad()
def score_micros(
    wrapped: ModelSegments,
    micros: Sequence[MicroBatch],
    masks: Sequence[npt.NDArray[np.bool_]],
    logprob_settings: LogprobSettings,
) -> list[Tensor]:
    """Return F32 [T] per micro-batch: log-probabilities of the tokens that its mask selects, 0 at other tokens. Collective.

    The value at the first token of a sequence is always 0. The list is empty except on the last stage. Columns are complete on
    every context parallel rank.
    """
    mask_of = {id(micro): mask for micro, mask in zip(micros, masks, strict=True)}
    model = wrapped.last

    def on_output(micro: MicroBatch, hidden: Tensor, non_loss_data: bool = True) -> Tensor:
        predictions = micro.layout.predictions(mask_of[id(micro)])
        ids = micro.batch.token_ids[predictions.target].astype(np.int64)
        logprobs, _ = model.scores(
            hidden,
            to_device(predictions.source, hidden.device),
            to_device(ids, hidden.device),
            temperature=logprob_settings.temperature,
            chunk=logprob_settings.chunk,
            entropy=False,
        )
        out = torch.zeros(micro.layout.num_tokens, device=hidden.device)
        out[to_device(predictions.target, hidden.device)] = logprobs
        return out

    wrapped.eval()  # disables recompute, which only a backward pass needs
    try:
        return sum_columns(run_schedule(wrapped, micros, on_output, train=False), model.cp_group)
    finally:
        wrapped.train()


def sum_columns(columns: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Sum columns over the ranks of ``group`` in one collective. The sum is exact if each entry is 0 on all ranks but one."""
    if not columns or group.size() == 1:
        return list(columns)
    joined_column = torch.cat(list(columns))
    dist.all_reduce(joined_column, group=group)
    return list(joined_column.split([len(column) for column in columns]))
