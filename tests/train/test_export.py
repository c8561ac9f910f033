"""Exported weights give the same outputs in transformers; buckets contain the manifest in order."""

from __future__ import annotations

import json

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.lifecycle import ExportedWeights
from tests.train.parity import by_expert
from tests.train.weights import assert_hf_agrees

pytestmark = pytest.mark.ranks

MAX_BYTES = 40_000
CASES = {
    "export tied tp2": ("tied", Layout(**SP)),
    "export untied pp2": ("untied", Layout(pp=2)),
    "export tied pp2": ("tied", Layout(pp=2)),
    "export untied dp2": ("untied", Layout(dp=2)),
    "export tied cp2": ("tied", Layout(cp=2)),
    "export tied vpp2": ("tied", Layout(pp=2, vpp=2)),
    "export experts ep2": ("qwen3_moe", Layout(dp=2, ep=2)),
    "export experts tp2 ep2": ("qwen3_moe", Layout(ep=2, **SP)),
}
PUSHES = {
    "push untied tp2": ("untied", Layout(tp=2)),
    "push tied pp2": ("tied", Layout(pp=2)),
    "push experts ep2": ("qwen3_moe", Layout(dp=2, ep=2)),
}
JOBS = {
    2: [RankJob(name, "tests.train.lifecycle:push_to_engine", case) for name, case in PUSHES.items()]
    + [RankJob(name, "tests.train.lifecycle:export", (*case, MAX_BYTES)) for name, case in CASES.items()]
    + [RankJob("export bfloat16", "tests.train.lifecycle:export", ("tied", Layout(**SP), MAX_BYTES, "bfloat16"))]
}


@pytest.mark.parametrize("name", CASES)
def test_hf_loads_the_export_and_agrees(name: str, results: Results) -> None:
    assert_hf_agrees(results[name])


@pytest.mark.parametrize("name", CASES)
def test_buckets_hold_every_hf_tensor_once_and_in_order(name: str, results: Results) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    exported: list[ExportedWeights] = results[name]
    kind = CASES[name][0]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(exported[0].folder))
    expected = {n: tuple(p.shape) for n, p in by_expert(dict(model.named_parameters())).items()}
    assert ("lm_head.weight" in expected) == (kind != "tied")
    shapes_sent: dict[str, tuple[int, ...]] = {}
    for e in exported:
        tensors = [entry for bucket in e.buckets for entry in bucket]
        assert len(e.buckets) > 3
        if not e.is_sender:
            assert tensors == []
            continue
        assert tensors == e.manifest
        assert all(
            size <= MAX_BYTES or len(bucket) == 1 for size, bucket in zip(e.bucket_bytes, e.buckets, strict=True)
        )
        assert not shapes_sent.keys() & {n for n, _, _ in tensors}
        shapes_sent |= {n: shape for n, shape, _ in tensors}
    assert shapes_sent == expected


@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_the_tensors_of_all_stages_in_the_same_buckets(name: str, results: Results) -> None:
    exported: list[ExportedWeights] = results[name]
    first = exported[0].replicated
    assert len(first) > 3
    assert all(e.replicated == first for e in exported)
    digests = {tensor: digest for e in exported for tensor, digest in e.sent.items()}
    assert {tensor: digest for bucket in first for tensor, digest in bucket} == digests
    stages = [[m[0] for m in e.manifest] for e in exported if e.is_sender]
    assert [tensor for bucket in first for tensor, _ in bucket] == [tensor for stage in stages for tensor in stage]


@pytest.mark.parametrize("name", PUSHES)
def test_a_push_over_ipc_gives_every_rank_of_an_engine_every_tensor(name: str, results: Results) -> None:
    """Ranks, process groups and export are real. The engine is a stand-in, and addresses contain the bytes."""
    first, second = results[name]
    assert first["requests"] > 6 and second["requests"] == 0, "one rank sends the requests of an engine"
    assert first["received"] == [first["expected"]] * 2
    assert sorted(first["reported"] + second["reported"]) == sorted(first["expected"])


def test_export_records_its_dtype(results: Results) -> None:
    exported: list[ExportedWeights] = results["export bfloat16"]
    assert {dtype for _, _, dtype in exported[0].manifest} == {"bfloat16"}
    assert json.loads((exported[0].folder / "config.json").read_text())["dtype"] == "bfloat16"
