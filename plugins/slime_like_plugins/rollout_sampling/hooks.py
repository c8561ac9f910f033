"""Where ``draw`` and temperature-scaled scores enter SGLang."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime_like_plugins.rollout_sampling import kernel
from slime_like_plugins.rollout_sampling.draw import draw, filtered, uniform
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

logger = logging.getLogger(__name__)

SCORE_ROWS = 2_048  # rows of logits held at once while scoring


def seed_of(request: Any) -> int:
    """The request's seed; without one, a number all tensor-parallel ranks agree on: a hash of its id."""
    if request.sampling_params.sampling_seed is not None:
        return request.sampling_params.sampling_seed
    digest = hashlib.blake2b(request.rid.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.cache
def warn_of_drafts() -> None:
    """Say once what cannot be honoured."""
    logger.warning("sampling_seed does not count under speculative decoding: SGLang verifies drafts without seeds")


def attach_seeds(info: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
    """After ``SamplingBatchInfo.from_schedule_batch``, which drops seeds outside the deterministic mode."""
    speculation = getattr(batch, "spec_algorithm", None)
    if speculation is not None and not speculation.is_none():
        warn_of_drafts()
    info.sampling_seed = torch.tensor([seed_of(request) for request in batch.reqs], dtype=torch.int64).to(info.device)


def attach_temperature(metadata: Any, cls: type, forward_batch: Any) -> None:
    """After ``LogitsMetadata.from_forward_batch``: its ``temperature`` field is never filled upstream."""
    if forward_batch.sampling_info is not None:
        metadata.temperature = forward_batch.sampling_info.temperatures


def sample(original: Callable[..., Tensor], sampler: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Around ``Sampler.forward``: seeded tokens and log-softmax(logits / temperature) of them.

    A batch in which a request asks for its sampling mask, or is watermarked, takes SGLang's own way; its tokens are drawn
    by ``sample_from_probs`` there, so that seeds count all the same.
    """
    names = ("return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions")
    call = dict(zip(names, args, strict=False)) | kwargs
    foreign = info.sampling_mask_batch_indices is not None or call.get("logprob_logits") is not None
    if foreign or info.sampling_seed is None:
        return original(sampler, output, info, *args, **kwargs)
    drawn = draw_plainly(output.next_token_logits, info, call)
    if drawn is not None:
        tokens_B, output.next_token_logprobs = drawn
        sampler._sync_token_ids_across_tp(tokens_B, info)
        return tokens_B
    logits_BV = sampler._preprocess_logits(output.next_token_logits, info).float()
    logprobs_BV = torch.log_softmax(logits_BV / info.temperatures, dim=-1)
    tokens_B = choose(logprobs_BV, logprobs_BV.exp, info, call["positions"])
    if call["return_logprob"]:
        if any(call["top_logprobs_nums"]) or any(ids is not None for ids in call["token_ids_logprobs"]):
            processor = sampler.output_logprob_processor
            asked = (logprobs_BV, call["top_logprobs_nums"], call["token_ids_logprobs"], tokens_B)
            processor.compute_logprobs(*asked).write_output_to(output)
        else:
            output.next_token_logprobs = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    tokens_B = tokens_B.to(torch.int32)
    sampler._sync_token_ids_across_tp(tokens_B, info)
    return tokens_B


def sample_from_probs(
    original: Callable[..., Any], sampler: Any, probs_BV: Tensor, info: Any, positions_B: Tensor, *args: Any
) -> Any:
    """Around ``Sampler._sample_from_probs``: tokens, and for those who ask what they were drawn from.

    SGLang's own refuses seeds beside min-p and with flashinfer, and draws seeded tokens by a Triton kernel, which a CPU
    does not run.
    """
    if info.sampling_seed is None:
        return original(sampler, probs_BV, info, positions_B, *args)
    from sglang.srt.layers.sampler import _SamplingMaskCapture as Capture

    tokens_B = choose(probs_BV, lambda: probs_BV, info, positions_B).to(torch.int32)
    asking = info.sampling_mask_batch_indices
    if asking is None:
        return tokens_B, None
    kept, ids = filtered(probs_BV[asking], info.top_ps[asking], info.top_ks[asking], info.min_ps[asking])
    return tokens_B, Capture(weights=kept, token_ids=ids.to(torch.int32), selected_weight=None, batch_rows=asking)


def draw_plainly(logits_BV: Tensor, info: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Tokens and their log-probabilities by the kernel in use; ``None``: none is, or the batch asks for more."""
    draw_rows = kernel()
    if draw_rows is None or logits_BV.dtype is not torch.float32 or info.has_custom_logit_processor:
        return None
    if info.need_top_p_sampling or info.need_min_p_sampling or top_k_counts(info):
        return None
    if call["return_logprob"] and (
        any(call["top_logprobs_nums"]) or any(ids is not None for ids in call["token_ids_logprobs"])
    ):
        return None
    return draw_rows(logits_BV, info.temperatures, info.top_ks, info.sampling_seed, call["positions"])


def top_k_counts(info: Any) -> bool:
    """Whether a request is limited to its k most probable tokens, 1 (greedy) excepted."""
    if not info.need_top_k_sampling or info.is_all_greedy:
        return False
    return bool(((info.top_ks > 1) & (info.top_ks < info.vocab_size)).any())


def choose(scores_BV: Tensor, weigh: Callable[[], Tensor], info: Any, positions_B: Tensor) -> Tensor:
    """Int64 [B]: the next token of each request, of the highest score where greedy, else by ``weigh()``: [B, V] weights.

    A request draws the same token whatever the others of its batch ask for.
    """
    if info.is_all_greedy:
        return scores_BV.argmax(-1)
    uniform_B = uniform(info.sampling_seed, positions_B)
    probs_BV = weigh()
    tokens_B = draw(probs_BV, uniform_B)
    if info.need_top_p_sampling or info.need_min_p_sampling or top_k_counts(info):
        kept_BV, tokens_BV = filtered(probs_BV, info.top_ps, info.top_ks, info.min_ps)
        limited_B = (info.top_ps < 1.0) | (info.min_ps > 0.0) | ((info.top_ks > 1) & (info.top_ks < info.vocab_size))
        tokens_B = torch.where(limited_B, tokens_BV.gather(1, draw(kept_BV, uniform_B)[:, None])[:, 0], tokens_B)
    return torch.where(info.top_ks <= 1, scores_BV.argmax(-1), tokens_B) if info.is_any_greedy else tokens_B


def score(original: Callable[..., tuple[Any, Tensor]], processor: Any, **call: Any) -> tuple[Any, Tensor]:
    """Around ``InputLogprobProcessor.forward``: log-probabilities of given tokens at the request's temperature.

    The rows are projected a second time where a temperature is not 1: scoring is rare, and the sampled rows that
    travel with them must stay as they are.
    """
    result, sampled = original(processor, **call)
    metadata, rows_R = call["logits_metadata"], call["input_logprob_indices"]
    temperatures = metadata.temperature
    if temperatures is None or not len(rows_R) or bool((temperatures == 1).all()):
        return result, sampled
    sequence_R = torch.tensor(call["token_to_seq_idx"], device=rows_R.device)[rows_R]
    token_R = metadata.extend_input_logprob_token_ids_gpu
    parts: list[Tensor] = []
    for part in torch.arange(len(rows_R), device=rows_R.device).split(SCORE_ROWS):
        states = call["pruned_states"][rows_R[part]]
        logits = call["get_logits_fn"](states, call["lm_head"], metadata, use_logits_buffer=False).float()
        logprobs = torch.log_softmax(logits / temperatures[sequence_R[part]], dim=-1)
        parts.append(logprobs.gather(1, token_R[part][:, None])[:, 0])
    result.token_logprobs = torch.cat(parts)
    return result, sampled


HOOKS = (
    Hook("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", "after", attach_seeds),
    Hook("sglang.srt.layers.sampler.Sampler.forward", "around", sample),
    Hook("sglang.srt.layers.sampler.Sampler._sample_from_probs", "around", sample_from_probs),
    Hook("sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch", "after", attach_temperature),
    Hook("sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward", "around", score),
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks("rollout_sampling", HOOKS)
