"""Arms of the benchmark of remote experts compute the same sums; its tables, for measurements made up by the tests."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import pytest
import torch

from slime_like.config.schema.remote_experts import RemoteOptions
from tests.remote_experts.forked_layer import ForkedProcess

bench: Any = importlib.import_module("benchmarks.remote_experts")


def test_local_sums_are_those_of_the_split_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PROMPT", 64)
    layers = bench.make_layers()
    assert len(layers) == bench.SMALL.layers and layers[0].ids.shape == (64, bench.TOP_K)
    x = torch.randn((64, bench.SMALL.hidden))
    layer, num = layers[0], bench.EXPERTS // 2
    local, buckets = bench.split(layer.ids, layer.weights, bench.ROWS)
    sums = bench.expert_sums(x, local, layer.weights, layer.w13[:num], layer.w2[:num])
    for bucket in buckets:
        rows = bucket.rows_of(x)
        sums[bucket.index()] += bench.expert_sums(rows, bucket.ids, bucket.weights, layer.w13[num:], layer.w2[num:])
    every = bench.Local(layers).sums(0, x, layer.ids, layer.weights)
    torch.testing.assert_close(sums, every, atol=1e-5, rtol=1e-5)


def test_a_prompt_in_batches_takes_a_tenth_of_the_calls_and_in_float16_half_of_the_payload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ForkedProcess)
    size = bench.LayerSize(4, bench.SMALL.hidden, 8)  # the expert size changes neither calls nor payload
    layers, x = bench.make_layers(size), torch.randn((bench.PROMPT, size.hidden))
    assert (len(layers), len(x)) == (4, 4248)
    traffics: list[Any] = []
    for mode, dtype in (("stream", "float32"), ("batched", "float16")):
        with contextlib.ExitStack() as stack:
            options = RemoteOptions(count=bench.EXPERTS // 2, mode=mode, payload_dtype=dtype, deadline_s=120.0)
            run = bench.Remote(layers, options)
            stack.callback(run.experts.close)
            bench.prefill(run, layers, x)
            traffics.append(bench.traffic(run))
    stream, batched = traffics
    assert batched.rows == stream.rows
    assert batched.calls <= 0.1 * stream.calls
    assert batched.payload_bytes <= 0.52 * stream.payload_bytes


def test_the_table_compares_with_stream_in_float32() -> None:
    tokens = bench.DECODE_STEPS * bench.DECODE_BATCH
    arms = {
        "all local": bench.ArmResult((2.0, 1.0, 3.0), (1.0,), 0, 0),
        "stream, float32": bench.ArmResult((4.0,), (2.0,), 1000, 8 << 20),
        "batched, float16": bench.ArmResult((3.0,), (), 50, 4 << 20),
    }
    assert bench.table(arms)[2:] == [
        f"| all local | - | - | 2.000 | {tokens:,} |",
        f"| stream, float32 | 1,000 (+0.0%) | 8.00 (+0.0%) | 4.000 | {tokens // 2:,} |",
        "| batched, float16 | 50 (-95.0%) | 4.00 (-50.0%) | 3.000 | - |",
    ]
    text = bench.page({"Socket": arms}, "Machine: this one.", "python benchmarks/remote_experts.py", 3)
    assert "Medians of 3 rounds" in text and "## Socket" in text
