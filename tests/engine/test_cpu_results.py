"""Fast path for sampled tokens, without an engine: batches that it processes, and batches that it leaves to SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_like_plugins.sglang_cpu import results


class Processor:
    """Fake of SGLang's processor that records finished requests and counts streamed outputs."""

    enable_overlap = enable_overlap_mlx = False
    decode_offload_manager = None
    tree_cache = SimpleNamespace(supports_mamba=lambda: False)
    model_config = SimpleNamespace(self_opened_think_start_ids=None)

    def __init__(self) -> None:
        self.finished_indices: list[int] = []
        self.num_streamed = 0
        self.metrics_reporter = SimpleNamespace(
            num_generated_tokens=0, forward_ct_decode=0, report_decode_stats=lambda *_, **__: None
        )
        allocator = SimpleNamespace(free_group_begin=lambda: None, free_group_end=lambda: None)
        self.token_to_kv_pool_allocator = allocator
        self.output_streamer = SimpleNamespace(stream_output=self._stream)

    def _stream(self, *_: Any) -> None:
        self.num_streamed += 1

    def _handle_finish_state_updated_req(self, request: Any, batch: Any, result: Any, i: int, output: Any) -> None:
        self.finished_indices.append(i)


def request(tokens: int = 3, **changes: Any) -> Any:
    sampling = SimpleNamespace(stop_strs=[], stop_regex_strs=[], max_new_tokens=20, stop_token_ids={9})
    log = SimpleNamespace(
        top_logprobs_num=0, token_ids_logprob=None, output_token_logprobs_val=[], output_token_logprobs_idx=[]
    )
    fields: dict[str, Any] = {
        **dict.fromkeys(results.ABSENT),
        **dict.fromkeys(results.OFF, False),
        "sampling_params": sampling,
        "logprob": log,
        "output_ids": [1] * tokens,
        "to_finish": None,
        "vocab_size": 50,
        "eos_token_ids": {8},
        "return_logprob": True,
        "done": False,
        "time_stats": SimpleNamespace(set_last_decode_finish_time=lambda _: None),
    }
    other_request = SimpleNamespace(**{**fields, **changes})
    other_request.finished = lambda: other_request.done
    other_request.update_finish_state = lambda _: setattr(other_request, "done", True)
    return other_request


def process(requests: list[Any], tokens: list[int]) -> Processor | None:
    """Return the processor, or ``None`` if SGLang's own function processed the batch."""
    names = ("customized_info", "sampling_mask_output", "hidden_states")
    output = SimpleNamespace(next_token_logprobs=torch.arange(len(tokens)) * -0.5, **dict.fromkeys(names))
    names = ("copy_done", "auxiliary_host_output", "routed_experts_output", "indexer_topk_output")
    result = SimpleNamespace(
        logits_output=output,
        next_token_ids=torch.tensor(tokens),
        num_non_draft_tokens_per_req=1,
        can_run_cuda_graph=False,
        **dict.fromkeys(names),
    )
    spec = SimpleNamespace(is_none=lambda: True)
    batch = SimpleNamespace(reqs=requests, return_logprob=True, spec_algorithm=spec, mamba_track_mask_cpu=None)
    processor, originals = Processor(), list[Any]()
    results.process_decode(lambda *args: originals.append(args), processor, batch, result)
    return None if originals else processor


def test_tokens_that_end_no_request_are_appended_without_a_message() -> None:
    requests = [request(), request(4), request(return_logprob=False)]
    processor = process(requests, [5, 6, 7])
    assert processor is not None
    assert processor.finished_indices == []
    assert processor.num_streamed == 0
    assert processor.metrics_reporter.num_generated_tokens == 3
    assert [r.output_ids[-1] for r in requests] == [5, 6, 7]
    assert [r.logprob.output_token_logprobs_val for r in requests] == [[0.0], [-0.5], []]


@pytest.mark.parametrize(
    ("token", "other_request"),
    [
        (9, request()),
        (8, request()),
        (5, request(19)),
        (50, request()),
        (-1, request()),
        (5, request(to_finish="abort")),
    ],
    ids=["stop", "end", "length", "beyond", "negative", "aborted"],
)
def test_sglang_handles_the_end_of_a_request(token: int, other_request: Any) -> None:
    processor = process([request(), other_request], [5, token])
    assert processor is not None
    assert (processor.finished_indices, processor.num_streamed) == ([1], 1)


def test_output_is_streamed_at_its_interval() -> None:
    other_request = request(49)
    other_request.sampling_params.max_new_tokens = 100
    processor = process([other_request], [5])
    assert processor is not None
    assert (processor.finished_indices, processor.num_streamed) == ([], 1)


@pytest.mark.parametrize("name", [*results.ABSENT, *results.OFF])
def test_a_batch_with_any_other_feature_is_left_to_sglang(name: str) -> None:
    assert process([request(), request(3, **{name: object()})], [5, 5]) is None
