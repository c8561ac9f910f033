"""Fast path for requests that need only tokens, log-probabilities and, at their end, routed experts.

SGLang passes every token of every request through a dozen functions, which for a small model cost half as much as its
forward. Here a token is just appended, except if it ends its request or is due to be sent. Requests that finish, and all other
batches, go through SGLang's own functions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_like_plugins.plugin_names import CPU_KERNELS_VARIABLE
from slime_like_plugins.sglang_hooks import Hook

PLAIN = "_slime_like_plain"  # attribute of a request: its StopConditions, or None if it is not plain
ABSENT = ("beam_group", "grammar", "multimodal_inputs", "customized_info", "tokenizer")  # None in a plain request
OFF = (
    "return_sampling_mask",
    "return_hidden_states",
    "return_indexer_topk",
    "require_reasoning",
    "stream",
)


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Conditions under which a token ends its request."""

    stop_tokens: frozenset[int]
    max_tokens: int
    vocab_size: int


def plain_request(request: Any) -> StopConditions | None:
    """Return the stop conditions of a plain request, which the fast path can process; None for any other.

    The result is computed once and kept in the request.
    """
    cached: StopConditions | bool | None = getattr(request, PLAIN, False)
    if not isinstance(cached, bool):
        return cached
    sampling = request.sampling_params
    plain = (
        all(getattr(request, name) is None for name in ABSENT)
        and not any(getattr(request, name) for name in OFF)
        and not (sampling.stop_strs or sampling.stop_regex_strs)
        and request.logprob.top_logprobs_num == 0
        and request.logprob.token_ids_logprob is None
        and request.vocab_size is not None
    )
    stop_tokens = frozenset(sampling.stop_token_ids or ()) | frozenset(request.eos_token_ids or ())
    vocab_size = int(request.vocab_size or 0)
    conditions = StopConditions(stop_tokens, sampling.max_new_tokens, vocab_size) if plain else None
    setattr(request, PLAIN, conditions)
    return conditions


def is_plain_batch(processor: Any, batch: Any, result: Any) -> bool:
    """Return True if all requests are plain (see ``plain_request``) and no feature handles the results of the step specially.

    Always return False if ``rollout.cpu_kernels`` is ``off``.
    """
    output = result.logits_output
    return (
        os.environ.get(CPU_KERNELS_VARIABLE) != "off"
        and batch.spec_algorithm.is_none()
        and batch.mamba_track_mask_cpu is None
        and output is not None
        and output.customized_info is None
        and output.sampling_mask_output is None
        and output.hidden_states is None
        and result.copy_done is result.auxiliary_host_output is result.routed_experts_output is None
        and result.indexer_topk_output is None
        and result.num_non_draft_tokens_per_req == 1
        and not (processor.enable_overlap or processor.enable_overlap_mlx)
        and processor.decode_offload_manager is None
        and not processor.tree_cache.supports_mamba()
        and not processor.model_config.self_opened_think_start_ids
        and all(plain_request(request) is not None for request in batch.reqs)
    )


def process_decode(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """Hook around ``SchedulerBatchResultProcessor.process_batch_result_decode``: process plain batches on the fast path.

    Remove when SGLang has a fast path of its own.
    """
    if not is_plain_batch(processor, batch, result):
        original(processor, batch, result)
        return
    from sglang.srt.managers.scheduler_components.output_streamer import DEFAULT_FORCE_STREAM_INTERVAL

    output, reporter = result.logits_output, processor.metrics_reporter
    tokens: list[int] = result.next_token_ids.tolist()
    logprobs: list[float] = output.next_token_logprobs.tolist() if batch.return_logprob else [0.0] * len(tokens)
    reporter.num_generated_tokens += len(tokens)
    processor.token_to_kv_pool_allocator.free_group_begin()
    now, should_send = time.perf_counter(), False
    for i, (request, token, logprob) in enumerate(zip(batch.reqs, tokens, logprobs, strict=True)):
        request.time_stats.set_last_decode_finish_time(now)
        request.output_ids.append(token)
        conditions: StopConditions = getattr(request, PLAIN)
        length = len(request.output_ids)
        in_vocab = 0 <= token < conditions.vocab_size
        continues = in_vocab and length < conditions.max_tokens and token not in conditions.stop_tokens
        if not continues or request.to_finish is not None:
            request.update_finish_state(1)
            processor._handle_finish_state_updated_req(request, batch, result, i, output)
            should_send = should_send or request.finished()
        if request.return_logprob:
            request.logprob.output_token_logprobs_val.append(logprob)
            request.logprob.output_token_logprobs_idx.append(token)
        should_send = should_send or length % DEFAULT_FORCE_STREAM_INTERVAL == 0
    if should_send:
        processor.output_streamer.stream_output(batch.reqs, batch.return_logprob)
    processor.token_to_kv_pool_allocator.free_group_end()
    reporter.forward_ct_decode = (reporter.forward_ct_decode + 1) % (1 << 30)
    reporter.report_decode_stats(result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=len(tokens))


HOOK = Hook(
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_decode",
    "around",
    process_decode,
)
