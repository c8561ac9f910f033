"""Requests for actions that other ranks repeat: simultaneous ones, and those of other nodes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from torch.distributed import HashStore

from slime_like.distributed.guard import symmetric_actions
from slime_like.distributed.guard.symmetric_actions import SymmetricActions


def test_ranks_follow_the_strongest_of_simultaneous_requests(tmp_path: Path) -> None:
    for first, second in (("clear", "trim"), ("trim", "clear")):
        ranks = [SymmetricActions(tmp_path / first / "requests") for _ in range(3)]
        ranks[0].publish(first)
        ranks[1].publish(second)  # without having read the first request
        actions_of_ranks = [
            {rank.next_action(), action} for rank, action in zip(ranks, (first, second, ""), strict=True)
        ]
        assert all("clear" in actions for actions in actions_of_ranks)
        assert [rank.next_action() for rank in ranks] == ["", "", ""]


def test_a_stronger_request_reaches_a_node_that_has_copied_the_weaker_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric_actions, "_wrapper_numbers", itertools.repeat(1))
    nodes = {name: SymmetricActions(tmp_path / name / "requests") for name in ("a", "b")}
    second_rank, store = SymmetricActions(tmp_path / "a" / "requests"), HashStore()
    for node in (*nodes.values(), second_rank):
        monkeypatch.setattr(node, "_poll_store", lambda store: None)
        node.connect(store)
    nodes["a"].publish("trim")
    nodes["b"]._copy_new(store)
    second_rank.publish("clear")  # without having read the first request
    nodes["b"]._copy_new(store)
    assert [rank.next_action() for rank in (nodes["a"], nodes["b"])] == ["clear", "clear"]


def test_many_requests_reach_another_node_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that copied one request per poll would fall behind, and its own requests would have numbers already used."""
    monkeypatch.setattr(symmetric_actions, "_wrapper_numbers", itertools.repeat(1))
    nodes, store = [SymmetricActions(tmp_path / name / "requests") for name in ("a", "b")], HashStore()
    for node in nodes:
        monkeypatch.setattr(node, "_poll_store", lambda store: None)
        node.connect(store)
    for action in ("trim", "clear", *["trim"] * 8):
        nodes[0].publish(action)
    nodes[1]._copy_new(store)
    assert [nodes[1].next_action() for _ in range(2)] == ["clear", ""]
    nodes[1].publish("trim")
    nodes[0]._copy_new(store)
    assert [nodes[0].next_action() for _ in range(2)] == ["trim", ""]
