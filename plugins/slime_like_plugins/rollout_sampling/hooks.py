"""Hooks that add seeded sampling and temperature-scaled scores to SGLang, together with the hooks of ``columns``."""

from __future__ import annotations

import functools
import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_like_plugins.plugin_names import ROLLOUT_SAMPLING
from slime_like_plugins.rollout_sampling import columns, kernel
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

BLOCK = 256  # the vocabulary is searched in two levels: blocks of this size, then tokens of a block

# Constants of the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014), as signed 64-bit integers; torch's int64 arithmetic wraps in the same way.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 ``x``."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_bits(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 ``x``."""
    x = (x ^ _shift_right(x, 30)) * FIRST
    x = (x ^ _shift_right(x, 27)) * SECOND
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return float64 [B] in [0, 1), which depends only on seed and position, not on batch or schedule."""
    state = _mix_bits(seeds_B.long() + GAMMA)
    bits = _mix_bits(state ^ _mix_bits((positions_B.long() + 1) * GAMMA))
    return _shift_right(bits, 11).double() * 2.0**-53


def _search(weights_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose running sum exceeds the target, and the target minus the sum before that index.

    An index of weight 0 is never returned: the target is clamped below the total, and weight 0 does not change the sum.
    """
    sums_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    total_B = sums_BN[:, -1]
    target_B1 = torch.minimum(target_B, torch.nextafter(total_B, torch.zeros_like(total_B)))[:, None]
    index_B1 = torch.searchsorted(sums_BN, target_B1, right=True)
    before_B1 = (sums_BN - weights_BN).gather(1, index_B1)
    return index_B1[:, 0], (target_B1 - before_B1)[:, 0].clamp_min(0.0)


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return int64 [B], one index per row, with probability proportional to its weight (inverse transform sampling)."""
    rows, vocabulary = weights_BV.shape
    blocks = -(-vocabulary // BLOCK)
    if blocks == 1:
        total_B = weights_BV.sum(-1, dtype=torch.float64)
        return _search(weights_BV, uniform_B * total_B)[0]
    padded_weights = weights_BV
    if blocks * BLOCK != vocabulary:
        padded_weights = weights_BV.new_zeros(rows, blocks * BLOCK)
        padded_weights[:, :vocabulary] = weights_BV
    tiles = padded_weights.view(rows, blocks, BLOCK)
    sums_BN = tiles.sum(-1, dtype=torch.float64)
    block_B, residual_B = _search(sums_BN, uniform_B * sums_BN.sum(-1))
    within_B, _ = _search(tiles[torch.arange(rows, device=tiles.device), block_B], residual_B)
    return block_B * BLOCK + within_B


def filtered(probs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor, min_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities in descending order, and their token ids.

    Tokens that top-k, nucleus or min-p excludes get probability 0. min-p is a share of the most probable
    token's probability. The rules are those of
    ``top_k_top_p_min_p_sampling_from_probs_torch`` in ``sglang.srt.layers.sampler``.
    """
    sorted_BV, tokens_BV = torch.sort(probs_BV, stable=True, dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    rank = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    excluded_BV = (before_BV > top_p_B[:, None]) | (rank >= top_k_B[:, None])
    excluded_BV |= sorted_BV < sorted_BV[:, :1] * min_p_B[:, None]
    return sorted_BV.masked_fill_(excluded_BV, 0.0), tokens_BV


logger = logging.getLogger(__name__)

SCORE_ROWS = 2_048  # rows of logits per chunk while scoring


def seed_of(request: Any) -> int:
    """Return the request's seed or, if it has none, a hash of its id: the same number on all tensor-parallel ranks."""
    if request.sampling_params.sampling_seed is not None:
        return request.sampling_params.sampling_seed
    digest = hashlib.blake2b(request.rid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.cache
def warn_speculative() -> None:
    """Log once that seeds have no effect with speculative decoding."""
    logger.warning("sampling_seed has no effect with speculative decoding: SGLang verifies drafts without seeds")


def attach_seeds(info: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
    """Hook after ``SamplingBatchInfo.from_schedule_batch``: set the seeds, which it drops outside the deterministic mode."""
    speculation = getattr(batch, "spec_algorithm", None)
    if speculation is not None and not speculation.is_none():
        warn_speculative()
    info.sampling_seed = torch.tensor([seed_of(request) for request in batch.reqs], dtype=torch.int64).to(info.device)


def attach_temperature(metadata: Any, cls: type, forward_batch: Any) -> None:
    """Hook after ``LogitsMetadata.from_forward_batch``: set ``temperature``, which it leaves unset."""
    if forward_batch.sampling_info is not None:
        metadata.temperature = forward_batch.sampling_info.temperatures


def sample(original: Callable[..., Tensor], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Hook around ``Sampler.forward``: sample tokens by seed, and compute log-probabilities as log_softmax(logits / temperature).

    Batches without seeds take SGLang's own path. Batches with sampling masks or watermarks take it too, but there
    ``sample_from_probs`` samples the tokens, so their seeds apply.
    """
    names = ("return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions")
    call = dict(zip(names, args, strict=False)) | kwargs
    has_special_rows = info.sampling_mask_batch_indices is not None or call.get("logprob_logits") is not None
    if has_special_rows or info.sampling_seed is None:
        return original(sampler, output, info, *args, **kwargs)
    sampled = draw_with_kernel(output.next_token_logits, info, call)
    if sampled is not None:
        tokens_B, output.next_token_logprobs = sampled
        sampler._sync_token_ids_across_tp(tokens_B, info)
        return tokens_B
    logits_BV = sampler._preprocess_logits(output.next_token_logits, info).float()
    logprobs_BV = torch.log_softmax(logits_BV / info.temperatures, dim=-1)
    tokens_B = choose(logprobs_BV, logprobs_BV.exp, info, call["positions"])
    if call["return_logprob"]:
        if any(call["top_logprobs_nums"]) or any(ids is not None for ids in call["token_ids_logprobs"]):
            processor = sampler.output_logprob_processor
            arguments = (logprobs_BV, call["top_logprobs_nums"], call["token_ids_logprobs"], tokens_B)
            processor.compute_logprobs(*arguments).write_output_to(output)
        else:
            output.next_token_logprobs = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    tokens_B = tokens_B.to(torch.int32)
    sampler._sync_token_ids_across_tp(tokens_B, info)
    return tokens_B


def sample_from_probs(
    original: Callable[..., Any], sampler: Any, probs_BV: Tensor, info: Any, positions_B: Tensor, *args: Any
) -> Any:
    """Hook around ``Sampler._sample_from_probs``: sample batches with seeds, also with min-p and on a CPU.

    Return tokens and distributions. The distributions are those of the requests with sampling masks; None if there are no
    such requests. SGLang's function rejects seeds with min-p and with flashinfer, and samples seeded tokens by a Triton
    kernel, which does not run on a CPU.
    """
    if info.sampling_seed is None:
        return original(sampler, probs_BV, info, positions_B, *args)
    from sglang.srt.layers.sampler import _SamplingMaskCapture as Capture  # pyright: ignore[reportPrivateUsage]  type that the sampler returns

    tokens_B = choose(probs_BV, lambda: probs_BV, info, positions_B).to(torch.int32)
    masked_rows = info.sampling_mask_batch_indices
    if masked_rows is None:
        return tokens_B, None
    limits = info.top_ps[masked_rows], info.top_ks[masked_rows], info.min_ps[masked_rows]
    weights, ids = filtered(probs_BV[masked_rows], *limits)
    return tokens_B, Capture(
        weights=weights, token_ids=ids.to(torch.int32), selected_weight=None, batch_rows=masked_rows
    )


def draw_with_kernel(logits_BV: Tensor, info: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return tokens and their log-probabilities from the selected kernel.

    The result is None if no kernel is selected, or it does not support the batch.
    """
    draw_rows = kernel.selected()
    if draw_rows is None or logits_BV.dtype is not torch.float32 or info.has_custom_logit_processor:
        return None
    if info.need_top_p_sampling or info.need_min_p_sampling or has_top_k(info):
        return None
    if call["return_logprob"] and (
        any(call["top_logprobs_nums"]) or any(ids is not None for ids in call["token_ids_logprobs"])
    ):
        return None
    return draw_rows(logits_BV, info.temperatures, info.top_ks, info.sampling_seed, call["positions"])


def has_top_k(info: Any) -> bool:
    """Return True if a request uses top-k sampling with k above 1 and below the size of the vocabulary."""
    if not info.need_top_k_sampling or info.is_all_greedy:
        return False
    return bool(((info.top_ks > 1) & (info.top_ks < info.vocab_size)).any())


def choose(scores_BV: Tensor, get_probs: Callable[[], Tensor], info: Any, positions_B: Tensor) -> Tensor:
    """Return the next tokens, int64 [B]: the highest score if greedy, otherwise a sample from ``get_probs()`` [B, V].

    The token of a request does not depend on the sampling options of other requests in the batch.
    """
    if info.is_all_greedy:
        return scores_BV.argmax(-1)
    uniform_B = uniform(info.sampling_seed, positions_B)
    probs_BV = get_probs()
    tokens_B = draw(probs_BV, uniform_B)
    if info.need_top_p_sampling or info.need_min_p_sampling or has_top_k(info):
        filtered_BV, tokens_BV = filtered(probs_BV, info.top_ps, info.top_ks, info.min_ps)
        limited_B = (info.top_ps < 1.0) | (info.min_ps > 0.0) | ((info.top_ks > 1) & (info.top_ks < info.vocab_size))
        tokens_B = torch.where(limited_B, tokens_BV.gather(1, draw(filtered_BV, uniform_B)[:, None])[:, 0], tokens_B)
    return torch.where(info.top_ks <= 1, scores_BV.argmax(-1), tokens_B) if info.is_any_greedy else tokens_B


def score(original: Callable[..., tuple[Any, Tensor]], processor: Any, **call: Any) -> tuple[Any, Tensor]:
    """Hook around ``InputLogprobProcessor.forward``: score input tokens at the request's temperature.

    Log-probabilities are computed from the logits that SGLang computes anyway, chunk by chunk. Computing logits a second
    time would hang with data-parallel attention: it is a collective, which ranks without scored tokens would not join.
    """
    metadata, rows_R = call["logits_metadata"], call["input_logprob_indices"]
    temperatures = metadata.temperature
    if temperatures is None or not len(rows_R) or bool((temperatures == 1).all()):
        return original(processor, **call)
    get_logits = call.pop("get_logits_fn")
    rows: list[int] = metadata.input_logprob_indices_cpu  # sorted
    sequence_R = torch.tensor([call["token_to_seq_idx"][row] for row in rows], device=rows_R.device)
    token_R, temperature_R = metadata.extend_input_logprob_token_ids_gpu, temperatures[sequence_R]
    parts: list[Tensor] = []
    first_row = 0

    def get_scored_logits(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal first_row
        logits = get_logits(states, *args, **kwargs)
        low, high = bisect_left(rows, first_row), bisect_left(rows, first_row + len(states))
        for start in range(low, high, SCORE_ROWS):
            part = slice(start, min(start + SCORE_ROWS, high))
            part_logits = logits[rows_R[part] - first_row].float() / temperature_R[part]
            parts.append(torch.log_softmax(part_logits, dim=-1).gather(1, token_R[part][:, None])[:, 0])
        first_row += len(states)
        return logits

    result, sampled = original(processor, get_logits_fn=get_scored_logits, **call)
    result.token_logprobs = torch.cat(parts)
    return result, sampled


HOOKS = (
    Hook("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "after", attach_seeds),
    Hook("sglang.srt.layers.sampler.Sampler.forward", "around", sample),
    Hook("sglang.srt.layers.sampler.Sampler._sample_from_probs", "around", sample_from_probs),
    Hook("sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch", "after", attach_temperature),
    Hook("sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward", "around", score),
    *columns.HOOKS,
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks(ROLLOUT_SAMPLING, HOOKS)
