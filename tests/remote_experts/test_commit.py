"""A worker that is lost between the engine's commit and its own: no request mixes two weight versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.config.schema.remote_experts import VARIABLE
from slime_like_plugins.remote_experts import hooks
from slime_like_plugins.remote_experts.experts import RemoteExperts, RemoteExpertsLost
from tests.remote_experts.forked_layer import LAYER, PATIENT, REMOTE, ForkedProcess, assert_sums, experts_of
from tests.remote_experts.test_policies import kill, worker_of
from tests.remote_experts.workers import SHAPES, weights_of

NEW = 2.0  # factor of the pushed weights


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers, and replace the exchange between ranks by that of a single rank."""
    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ForkedProcess)
    monkeypatch.setattr(hooks.dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(hooks.dist, "all_gather_object", lambda per_rank, own, group: per_rank.__setitem__(0, own))
    monkeypatch.setattr(hooks, "_failed", lambda message: SimpleNamespace(success=False, message=message))


def push(
    experts: RemoteExperts,
    monkeypatch: pytest.MonkeyPatch,
    at_own_commit: Callable[[], object] = lambda: None,
    after_commit: Callable[[], object] = lambda: None,
) -> Any:
    """Write new weights and commit them.

    ``at_own_commit`` is called in SGLang's commit, ``after_commit`` after the worker's commit.
    """
    monkeypatch.setattr(hooks, "_models", [SimpleNamespace(experts=experts, record_load=after_commit)])

    def commit_own(manager: object, request: object) -> Any:
        at_own_commit()
        return SimpleNamespace(success=True, message="")

    session = SimpleNamespace(selector="all")
    manager: Any = SimpleNamespace(
        _session=session, tp_cpu_group=None, _select_runners=lambda selector: [("target", None)]
    )
    experts.begin()
    for layer, matrices in ((0, weights_of(SHAPES)[0]), (LAYER, REMOTE)):
        for name, matrix in matrices.items():
            for expert, rows in enumerate(matrix * NEW):
                experts.write(layer, name, expert, 0, rows)
    return hooks.end_weight_update(commit_own, manager, None)


@pytest.mark.parametrize("moment", ["at_own_commit", "after_commit"])
@pytest.mark.parametrize("policy", ["required", "fallback", "respawn"])
def test_a_worker_that_ends_between_both_commits(policy: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With required the engine ends; with fallback it uses the new weights itself, with respawn it resends them."""
    options = replace(PATIENT, policy=policy)
    monkeypatch.setenv(VARIABLE, options.to_json())
    with experts_of(options) as experts:
        assert_sums(experts)
        action: dict[str, Callable[[], object]] = {moment: lambda: kill(worker_of(experts))}
        if policy == "required":
            with pytest.raises(RemoteExpertsLost, match="of rank 0"):
                push(experts, monkeypatch, **action)
                assert_sums(experts, NEW)
            return
        assert push(experts, monkeypatch, **action).success
        assert_sums(experts, NEW)
        assert experts.state.is_replaced == (policy == "fallback")
        assert experts.state.num_restarts == (policy == "respawn")


def test_no_worker_serves_weights_of_an_update_that_another_rank_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank's worker has all weights and another rank's has not: a request is refused."""
    monkeypatch.setenv(VARIABLE, PATIENT.to_json())
    with experts_of(PATIENT) as experts:
        with monkeypatch.context() as other_rank:
            other_rank.setattr(hooks, "_joined", lambda manager, text, failure="": "rank 1: 1 matrices")
            output = push(experts, monkeypatch)
        assert not output.success and "rank 1: 1 matrices" in output.message
        with pytest.raises(RemoteExpertsLost, match="weight version 0"):
            assert_sums(experts, NEW)
    with experts_of(PATIENT) as experts:
        assert push(experts, monkeypatch).success
        assert_sums(experts, NEW)
