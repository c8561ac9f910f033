"""Hooks that admit requests by the KV cache: SGLang charges each request with the tokens that it adds to the reservation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime_like_plugins.kv_capacity import admission as hooks
from slime_like_plugins.sglang_hooks import Hook

CHUNK, CAPACITY, MAX_NEW_TOKENS = 64, 10_000, 400


class QueuedRequest(SimpleNamespace):
    """Request whose prompt is in the KV cache up to ``prefix_len``."""

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len


def make_request(rid: str, *, prompt: int = 40, generated: int = 0, prefix_len: int = 0) -> QueuedRequest:
    """Return a request, which is a retracted one if it has generated tokens."""
    return QueuedRequest(
        rid=rid,
        output_ids=[0] * generated,
        sampling_params=SimpleNamespace(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=False),
        full_untruncated_fill_ids=[0] * (prompt + generated),
        prefix_len=prefix_len,
        kv=SimpleNamespace(req_pool_idx=None, holds_mamba=False),
        last_node=None,
        host_hit_length=0,
        swa_host_hit_length=0,
        auxiliary_swa_host_hit_length=0,
        needs_host_load_back=lambda: False,
        retracted_stain=generated > 0,
        finished=lambda: False,
    )


def hooked(hook: Hook, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(adder: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.kind == "around":
            return hook.function(original, adder, *args, **kwargs)
        return hook.function(original(adder, *args, **kwargs), adder, *args, **kwargs)

    return method


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's prefill adder with the hooks, after 100 responses of 10 tokens."""
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    estimate = hooks.Admission()
    estimate._finished_lengths.extend([(10, True)] * 100)
    monkeypatch.setattr(hooks, "admission", estimate)
    for name in ("_replay_len", "_account_prefill_cache_admission"):  # read SGLang's global settings
        monkeypatch.setattr(PrefillAdder, name, lambda *_: 0)
    for hook in hooks.HOOKS:
        name = hook.target.rpartition(".")[2]
        monkeypatch.setattr(PrefillAdder, name, hooked(hook, getattr(PrefillAdder, name)))
    cache, allocator = MagicMock(), MagicMock(page_size=1)
    cache.supports_mamba.return_value = False
    cache.evictable_size.return_value = allocator.request_slot_reserve.return_value = 0
    allocator.available_size.return_value = CAPACITY
    allocator.create_prefill_budget.return_value = PrefillBudget(allocator, cache)
    return PrefillAdder(1, cache, allocator, None, 1.0, CAPACITY, 4 * CHUNK)  # pyright: ignore


def reserved_tokens(adder: Any) -> int:
    """Return the tokens that SGLang has reserved for responses in this pass."""
    pages = [request.extend_len + adder.page_size for request in adder.can_run_list]
    return adder.memory_budget.total_offset - sum(pages)


def test_each_request_is_charged_with_the_tokens_that_it_adds(adder: Any) -> None:
    adder.add_chunked_req(make_request("last chunk", prompt=CHUNK + 10, prefix_len=CHUNK))
    assert reserved_tokens(adder) == hooks.admission.reservation(adder.can_run_list) < MAX_NEW_TOKENS
    for request in (make_request("new"), make_request("retracted", generated=50), make_request("new too")):
        adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
        assert adder.can_run_list[-1] is request
        assert reserved_tokens(adder) == hooks.admission.reservation(adder.can_run_list), request.rid
        assert request.sampling_params.max_new_tokens == MAX_NEW_TOKENS
