"""Weight updates of engines with several ranks: refused or committed on all of them, and no rank waits for another."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.config.schema.remote_experts import UNSUPPORTED_FIELDS, VARIABLE, RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.remote_experts import hooks
from slime_like_plugins.remote_experts.experts import RemoteExpertsLost

MISSING = ("layer 1 w2 of remote expert 0", 3, 6)


@dataclass
class RankUpdate:
    """Weight update on one of two ranks, with a fake exchange between the ranks."""

    monkeypatch: pytest.MonkeyPatch
    incomplete: list[tuple[str, int, int]] = field(default_factory=list)  # matrices of this rank's worker
    failure: str = ""  # failure of this rank's worker
    commit_failure: str = ""
    of_other_rank: list[tuple[str, str]] = field(default_factory=list)  # (text, failure) per exchange; then empty
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        experts = SimpleNamespace(
            begin=lambda: self.calls.append("begin"),
            unwritten=lambda: (self.incomplete, self.failure),
            commit=lambda: self.calls.append("commit") or self.commit_failure,
        )
        self.monkeypatch.setattr(
            hooks, "_models", [SimpleNamespace(experts=experts, record_load=lambda: self.calls.append("record"))]
        )
        self.monkeypatch.setattr(hooks.dist, "get_world_size", lambda group: 2)
        self.monkeypatch.setattr(hooks.dist, "all_gather_object", self.exchange)
        self.monkeypatch.setattr(hooks, "_failed", lambda message: SimpleNamespace(success=False, message=message))

    def exchange(self, per_rank: list[Any], own: object, group: object) -> None:
        """Return this rank's and the other rank's message in ``per_rank``."""
        self.calls.append("exchange")
        per_rank[:] = [own, self.of_other_rank.pop(0) if self.of_other_rank else ("", "")]

    def original(self, success: bool = True, message: str = "") -> Any:
        """Return a fake of the hooked SGLang function."""

        def call(manager: object, request: object) -> Any:
            self.calls.append("original")
            return SimpleNamespace(success=success, message=message)

        return call

    @property
    def manager(self) -> Any:
        """SGLang's manager with an open session."""
        roles = {"target": ["target"], "draft": ["draft"], "all": ["target", "draft"]}
        return SimpleNamespace(
            _session=SimpleNamespace(selector="all"),
            tp_cpu_group=None,
            _select_runners=lambda selector: [(role, None) for role in roles[selector]],
        )


def resolved_fields(**changes: object) -> SimpleNamespace:
    """Return the fields of ServerArgs that remote experts require, with ``changes``."""
    required: dict[str, object] = {field: value for field, (value, _) in UNSUPPORTED_FIELDS.items()}
    sizes = {"moe_runner_backend": "auto", "device": "cuda", "disable_cuda_graph": False, "tp_size": 2}
    graphs = {"cuda_graph_backend_prefill": "disabled", "cuda_graph_backend_decode": "disabled"}
    return SimpleNamespace(**required | sizes | graphs | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"ep_size": 2},
            [
                "SGLang resolved ep_size=2,",
                "set rollout.sglang.ep_size (--ep-size) to 1, or serve without remote experts",
            ],
        ),
        (
            {"quantization": "fp8"},
            ["resolved quantization='fp8'", "remove rollout.sglang.quantization (--quantization)"],
        ),
        ({"moe_runner_backend": "deep_gemm"}, ["(--moe-runner-backend) to auto or triton"]),
        ({"cuda_graph_backend_decode": "full"}, ["(--cuda-graph-backend-decode) to disabled"]),
    ],
)
def test_an_argument_that_sglang_resolved_is_refused_with_its_fix(changes: dict[str, object], words: list[str]) -> None:
    assert hooks.obstacle(resolved_fields(), RemoteOptions(count=1)) is None
    text = hooks.obstacle(resolved_fields(**changes), RemoteOptions(count=1)) or ""
    assert all(word in text for word in words), text


def test_errors_of_a_server_with_flags_name_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the error that stops the engine is translated, and the error of a lost worker."""
    update = RankUpdate(monkeypatch, failure="it ended")
    layer = SimpleNamespace(is_draft=False, is_shared_fused_moe=False)
    arguments = {"hidden_size": 1, "intermediate_size_per_partition": 1, "params_dtype": None}
    problem = ConfigError("rollout.remote_experts.load_file=a has no layer: set rollout.remote_experts.key_file")
    for argv, words, prefix in (
        (
            ["--remote-experts-count", "1"],
            "--remote-experts-load-file=a has no layer: set --remote-experts-key-file",
            "--remote-experts-",
        ),
        (
            [],
            "rollout.remote_experts.load_file=a has no layer: set rollout.remote_experts.key_file",
            "rollout.remote_experts.",
        ),
    ):
        monkeypatch.setattr("sys.argv", ["server", *argv])
        monkeypatch.setattr(hooks, "_model", lambda: SimpleNamespace(add=raising(problem)))
        with pytest.raises(SystemExit, match=re.escape(words)):
            hooks.create_weights(lambda *_, **__: None, None, layer, 4, **arguments)
        monkeypatch.setenv(VARIABLE, RemoteOptions(count=1).to_json())
        with pytest.raises(RemoteExpertsLost, match=re.escape(f"set {prefix}policy=fallback or respawn")):
            hooks.end_weight_update(update.original(), update.manager, None)
        count = RemoteOptions(count=1, workers=("a:1",))
        assert "workers has 1 address for tp_size=2" in (hooks.obstacle(resolved_fields(), count) or "")


def raising(error: Exception) -> Any:
    """Return a function that raises ``error``."""

    def call(*_: object) -> None:
        raise error

    return call


@pytest.fixture(autouse=True)
def respawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, RemoteOptions(count=1, policy="respawn").to_json())


def test_an_update_is_committed_after_every_rank_has_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    update = RankUpdate(monkeypatch)
    assert hooks.end_weight_update(update.original(), update.manager, None).success
    assert update.calls == ["exchange", "original", "commit", "record", "exchange"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_is_not_complete_on_one_rank_is_refused_on_both(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = RankUpdate(monkeypatch)
    if rank:
        update.of_other_rank = [("1 matrix: x", "")]
    else:
        update.incomplete = [MISSING]
    manager = update.manager
    output = hooks.end_weight_update(update.original(), manager, None)
    assert not output.success and f"rank {rank}: 1 matrix" in output.message and manager._session is None
    assert update.calls == ["exchange"]


def test_nothing_is_committed_if_the_engine_refuses_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    update = RankUpdate(monkeypatch)
    assert hooks.end_weight_update(update.original(False, "NaN"), update.manager, None).message == "NaN"
    assert "commit" not in update.calls


@pytest.mark.parametrize("commit_failure", [("", ""), ("", "its worker ended")])
def test_a_failed_commit_of_one_rank_fails_on_both(
    commit_failure: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = RankUpdate(monkeypatch, of_other_rank=[("", ""), commit_failure])
    update.commit_failure = "" if commit_failure[1] else "its worker ended"
    output = hooks.end_weight_update(update.original(), update.manager, None)
    assert not output.success and output.message == f"rank {int(bool(commit_failure[1]))}: its worker ended"


def test_a_required_worker_of_one_rank_ends_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, RemoteOptions(count=1).to_json())
    for of_other_rank, failure in (([("", "it ended")], ""), ([], "it ended")):
        update = RankUpdate(monkeypatch, failure=failure, of_other_rank=of_other_rank)
        with pytest.raises(RemoteExpertsLost, match="lost in a weight update: it ended"):
            hooks.end_weight_update(update.original(), update.manager, None)


def test_an_update_of_one_call_that_fails_without_a_message_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    update = RankUpdate(monkeypatch)
    output = hooks.update_at_once(update.original(False, ""), update.manager, None)
    assert not output.success and output.message == "rank 0: SGLang did not update the weights"
    assert "commit" not in update.calls


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_of_one_call_that_fails_on_one_rank_fails_on_both(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed rank takes part in the exchange, because the other rank waits for it."""
    update = RankUpdate(monkeypatch, of_other_rank=[("no such file", "")] if rank else [])
    output = hooks.update_at_once(update.original(bool(rank), "no such file"), update.manager, None)
    assert not output.success and output.message == f"rank {rank}: no such file"
    assert update.calls == ["original", "exchange"]


def test_an_update_of_the_draft_model_leaves_the_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for selector, calls in (("draft", ["original"]), ("target", ["original", "begin"])):
        update = RankUpdate(monkeypatch)
        hooks.begin_weight_update(update.original(), update.manager, SimpleNamespace(selector=selector))
        assert update.calls == calls
