"""Wrapper around collectives: each op passes it once with unchanged results. If it is off, nothing is wrapped."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.collectives import GROUP_LABELS, OPS, SLIME_SKIPS, Kind, aliases, canonical
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from tests.distributed.wrapped import ROUNDS, SHORT_AT, TRACED, Compared
from tests.train.jobs import Results

OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5_000}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "tp2": (Layout(tp=2), {}),
    "tp2 sp": (Layout(tp=2, sequence_parallel=True), {}),
    "pp2": (Layout(pp=2), {}),
    "vpp2": (Layout(pp=2, vpp=2), {}),
    "dp2": (Layout(dp=2), {}),
    "dp2 overlap": (Layout(dp=2, **OVERLAP), {"optim": {"clip_grad": 0.0}}),
    "dp2 plain optimizer": (Layout(dp=2, distributed_optimizer=False), {}),
    "cp2": (Layout(cp=2), {}),
    "ep2": (Layout(dp=2, ep=2), {"family": "qwen3_moe"}),
    "tp2 sp ep2": (Layout(tp=2, ep=2, sequence_parallel=True), {"family": "qwen3_moe"}),
}


def call_on_ranks(models: dict[str, Path], folder: Path) -> tuple[Any, ...]:
    """Return the call that the ranks of this file run."""
    return "tests.distributed.wrapped:run_all", 2, models, folder, LAYOUTS


@pytest.fixture(scope="module")
def ranks(results: Results) -> list[tuple[dict[str, Any], dict[str, Compared]]]:
    return results[__name__]


@pytest.fixture(scope="module")
def every_op(ranks: list[tuple[dict[str, Any], dict[str, Compared]]]) -> list[dict[str, Any]]:
    return [result for result, _ in ranks]


@pytest.fixture(scope="module")
def compared(ranks: list[tuple[dict[str, Any], dict[str, Compared]]]) -> list[dict[str, Compared]]:
    return [result for _, result in ranks]


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_saving_and_exporting_are_bitwise_unchanged(name: str, compared: list[dict[str, Compared]]) -> None:
    assert all(rank[name].same_bits for rank in compared)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LAYOUTS)
def test_counts_match_torchs_trace(name: str, compared: list[dict[str, Compared]]) -> None:
    for rank in compared:
        assert rank[name].traced == rank[name].counted
        assert sum(rank[name].traced.values()) > 10
        metrics = rank[name].metrics  # metrics of every rank, not only of the reporting one
        assert any(key.startswith("comm/") and key.endswith("/calls") and value > 0 for key, value in metrics.items())


@pytest.mark.ranks
def test_the_layouts_use_the_ops_they_should_cover(compared: list[dict[str, Compared]]) -> None:
    ops_of_layout = {name: set(compared[0][name].ops) for name in LAYOUTS}
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= ops_of_layout["tp2 sp"]
    assert {"isend", "irecv"} <= ops_of_layout["pp2"]
    assert {"isend", "irecv"} <= ops_of_layout["vpp2"]
    assert any(
        name.endswith("_coalesced") for name in ops_of_layout["dp2 overlap"]
    )  # megatron's manager, bound at its import
    assert any("reduce_scatter" in name for name in ops_of_layout["dp2"])
    assert "all_gather_object" in ops_of_layout["dp2"]  # checkpoints
    assert any(name.startswith("all_to_all") for name in ops_of_layout["ep2"])


# Ops that gloo lacks (all_to_all), only NCCL has (end_coalescing), or torch's functions on gloo do not reach.
NOT_ISSUED = {"all_gather_coalesced", "gather_into_tensor", "reduce_scatter_tensor_coalesced", "all_to_all"} | {
    "end_coalescing",
    "send_object_list",
    "recv_object_list",
}


@pytest.mark.ranks
@pytest.mark.parametrize("path", [0, 1], ids=["in C", "in Python"])
def test_an_op_is_counted_once_however_it_is_called(path: int, every_op: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(report["paths"][path] for report in every_op):
        assert all(result["same"])
        assert result["traced"] == result["counted"]
        calls = result["calls"]
        assert calls["all_reduce"] == 3  # bound before install; asynchronous; on the group itself
        assert result["bytes"]["all_reduce"] == 3 * 16
        assert calls["all_gather_into_tensor"] == 3 + (0 if "all_gather_into_tensor_coalesced" in calls else 2)
        assert calls["all_gather_into_tensor_coalesced"] == 1
        assert calls["all_reduce_coalesced"] == 1
        assert calls["broadcast_object_list"] == calls["batch_isend_irecv"] == 1
        assert (calls.get("send"), calls.get("recv")) == ((1, None) if rank else (None, 1))
        assert calls["isend"] + calls["irecv"] == 3
        assert result["no time"] == []
        assert result["in flight"] == 0
        assert {op.name for op in OPS} - set(calls) <= NOT_ISSUED | ({"recv"} if rank else {"send"})


@pytest.mark.ranks
def test_a_removed_or_disabled_wrapper_leaves_torchs_methods(every_op: list[dict[str, Any]]) -> None:
    assert all(rank["restored"] and rank["untouched"] for rank in every_op)


@pytest.mark.ranks
@pytest.mark.parametrize("action", ["trim", "clear", "raise"])
def test_a_shortage_on_one_rank(action: str, every_op: list[dict[str, Any]]) -> None:
    """Without ``guard.symmetric`` only the short rank acts; with it all ranks act before this op or the next one."""
    peer, short = (rank["shortage"][f"{action} False"] for rank in every_op)
    assert peer["actions"] == []
    assert [(text.split(":")[0], index) for text, index in short["actions"]] == [(action, SHORT_AT)]
    peer, short = (rank["shortage"][f"{action} True"] for rank in every_op)
    assert [(text.split(":")[0], index) for text, index in short["actions"]] == [(action, SHORT_AT)]
    ((text, index),) = peer["actions"]
    assert text.split(":")[0] == action
    assert index in (SHORT_AT, SHORT_AT + 1)
    assert action != "raise" or "requested by another rank" in text
    for rank in (peer, short):
        assert rank["sums"] == [2.0 * i + 1 for i in range(ROUNDS)]
        assert (rank["shortages"], rank["clears"]) == (1, action != "raise")


@pytest.mark.ranks
def test_a_group_decision_reaches_other_nodes(every_op: list[dict[str, Any]]) -> None:
    assert [rank["across nodes"] for rank in every_op] == [{"actions": ["trim"], "clears": 1}] * 2


@pytest.mark.ranks
def test_every_third_call_is_the_first_fourth_and_seventh(every_op: list[dict[str, Any]]) -> None:
    assert [rank["every third"] for rank in every_op] == [3, 3]


def test_every_alias_has_one_op() -> None:
    methods = [name for op in OPS for name in op.methods]
    assert len(methods) == len(set(methods))
    assert {op.name for op in OPS if op.kind is not Kind.COMPOSITE} == {*TRACED, "end_coalescing"}
    assert len({operator for _, operator in TRACED.values()}) == len(TRACED)
    assert canonical("k", "_allgather_base") is canonical("k", "all_gather_into_tensor")
    assert canonical("k", "alltoall_base") is canonical("k", "all_to_all_single")
    assert {canonical("k", name).name for name in SLIME_SKIPS} <= {op.name for op in OPS}
    assert aliases()["_reduce_scatter_base"].name == "reduce_scatter_tensor"
    with pytest.raises(ConfigError, match=r"guard\.ops\.allreduc: .*did you mean .*The ops are all_reduce"):
        canonical("guard.ops.allreduc", "allreduc")


def _megatron() -> Path:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def test_group_labels_exist_in_megatron() -> None:
    source = (_megatron() / "parallel_state.py").read_text()
    assert [name for name in GROUP_LABELS if name.isupper() and f"{name}" not in source] == []


def test_megatron_issues_no_op_past_the_wrapper() -> None:
    """Functional collectives and torch.distributed.nn call the group from C++, past the wrapper."""
    bypassing = ("_c10d_functional", "distributed.nn.functional", "_functional_collectives")
    allowed_paths = {"models/multimodal/context_parallel.py"}  # for images; checks for torch.compile are skipped below
    names: set[str] = set()
    for path in _megatron().rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if any(word in source for word in bypassing) else ():
            text = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if any(f"{word}." in text.split("(")[0] for word in bypassing) and "is_torchdynamo_compiling" not in text:
                names.add(str(path.relative_to(_megatron())))
    assert names <= allowed_paths
