"""Admission of requests by the length of responses, which is estimated from finished and running requests.

For each running request, SGLang keeps ``ratio * min(4096, max_new_tokens - generated)`` tokens free. The ratio starts at 0.7
whenever the engine has been idle, and falls to 0.1 within 600 steps, regardless of the length of the responses (it is 1 for
requests that ignore the end-of-sequence token). If responses are long, the cache overflows, and SGLang retracts requests and
recomputes their keys and values. Here the engine reserves the estimate of ``ResponseLengths``, plus the exact number of tokens
for requests whose length is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime_like_plugins.kv_capacity.lengths import ResponseLengths
from slime_like_plugins.plugin_names import KV_ADMISSION
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

WINDOW = 512  # finished responses from which lengths are estimated
MAX_TRACKED = 4_096  # requests observed at the same time
RESERVED = "_slime_like_reserved"
"""Attribute of a prefill adder: tokens reserved for the requests that run or were admitted in this pass."""


class Admission:
    """Response lengths in this process's scheduler, and the reservations that follow from them."""

    def __init__(self) -> None:
        self._running_requests: dict[str, Any] = {}  # request id -> request
        self._finished_lengths: deque[tuple[int, bool]] = deque(maxlen=WINDOW)  # (tokens, False if cut off or aborted)
        self._lengths = ResponseLengths.estimate(np.zeros(0, np.int64), np.zeros(0, np.bool_))

    def track(self, request: Any) -> None:
        """Start observing the length of an admitted request's response."""
        self._running_requests.setdefault(request.rid, request)
        if len(self._running_requests) > MAX_TRACKED:  # a request aborted in the queue never finishes
            self._record(self._running_requests.pop(next(iter(self._running_requests))))

    def observe(self, running_requests: Sequence[Any]) -> None:
        """Update the estimate with the requests that have finished, and with the current lengths of those still running."""
        for request in running_requests:
            self.track(request)
        for rid, request in list(self._running_requests.items()):
            if request.finished():
                del self._running_requests[rid]
                self._record(request)
        current_lengths = [len(r.output_ids) for r in self._running_requests.values() if not _has_fixed_length(r)]
        lengths = [*(tokens for tokens, _ in self._finished_lengths), *current_lengths]
        has_ended = [*(has_ended for _, has_ended in self._finished_lengths), *(False for _ in current_lengths)]
        self._lengths = ResponseLengths.estimate(np.array(lengths, np.int64), np.array(has_ended, np.bool_))

    def reservation(self, requests: Sequence[Any]) -> int:
        """Return the number of tokens to keep free for the rest of the responses to ``requests``."""
        fixed_requests = [request for request in requests if _has_fixed_length(request)]
        sampled_requests = [request for request in requests if not _has_fixed_length(request)]
        num_generated = np.array([len(request.output_ids) for request in sampled_requests], np.int64)
        max_tokens = np.array([request.sampling_params.max_new_tokens for request in sampled_requests], np.int64)
        num_fixed = sum(max(0, r.sampling_params.max_new_tokens - len(r.output_ids)) for r in fixed_requests)
        return num_fixed + self._lengths.reservation(num_generated, max_tokens)

    def _record(self, request: Any) -> None:
        if not _has_fixed_length(request):
            reason = request.finished_reason
            has_ended = reason is not None and reason.to_json()["type"] == "stop"
            self._finished_lengths.append((len(request.output_ids), has_ended))


admission = Admission()


def open_pass(result: None, adder: Any, *_: Any, **__: Any) -> None:
    """Hook after ``PrefillAdder.__init__``: reserve the estimated remaining tokens of running requests.

    The estimate replaces SGLang's guess.
    """
    pending_requests = [] if adder.running_batch is None else [r for r in adder.running_batch.reqs if not r.finished()]
    admission.observe(pending_requests)
    num_reserved = admission.reservation(pending_requests)
    running_requests = [] if adder.running_batch is None else adder.running_batch.reqs
    guess = sum(adder._get_running_request_total_token_offset(request) for request in running_requests)
    adder.memory_budget.total_offset += num_reserved - guess
    setattr(adder, RESERVED, num_reserved)


def add_request(original: Callable[..., Any], adder: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``PrefillAdder.add_one_req`` and ``add_chunked_req``: reserve the tokens that the request adds to the estimate.

    SGLang itself would reserve ``max_new_tokens``. For a prompt in chunks, it reserves tokens with the last chunk.
    """
    running_requests = [] if adder.running_batch is None else [r for r in adder.running_batch.reqs if not r.finished()]
    num_reserved = admission.reservation([*running_requests, *adder.can_run_list, request])
    params = request.sampling_params
    max_tokens, num_admitted = params.max_new_tokens, len(adder.can_run_list)
    params.max_new_tokens = min(max_tokens, len(request.output_ids) + max(0, num_reserved - getattr(adder, RESERVED)))
    try:
        return original(adder, request, *args, **kwargs)
    finally:
        params.max_new_tokens = max_tokens
        if len(adder.can_run_list) > num_admitted:
            admission.track(request)


def charge(
    original: Callable[..., None],
    adder: Any,
    prefix_len: int,
    extend_len: int,
    max_new_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Hook around ``PrefillAdder._update_prefill_budget``, which charges an admitted request, the last of ``can_run_list``.

    SGLang would charge ``max_new_tokens`` in full, although ``extend_len`` includes the tokens that a retracted request has
    already generated.
    """
    request = adder.can_run_list[-1]
    num_left = request.sampling_params.max_new_tokens - len(
        request.output_ids
    )  # ``max_new_tokens`` is clipped by SGLang
    num_tokens = min(max_new_tokens, max(0, num_left))
    setattr(adder, RESERVED, getattr(adder, RESERVED) + num_tokens)
    original(adder, prefix_len, extend_len, num_tokens, *args, **kwargs)


def _has_fixed_length(request: Any) -> bool:
    return request.sampling_params.ignore_eos or not request.sampling_params.max_new_tokens


ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS = (
    Hook(f"{ADDER}.__init__", "after", open_pass),
    Hook(f"{ADDER}.add_one_req", "around", add_request),
    Hook(f"{ADDER}.add_chunked_req", "around", add_request),
    Hook(f"{ADDER}._update_prefill_budget", "around", charge),
)


def install() -> None:
    """Apply the hooks in this process."""
    install_hooks(KV_ADMISSION, HOOKS)
