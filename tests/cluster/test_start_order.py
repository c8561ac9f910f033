"""Order in which engines and trainer start, and settings that a rank makes before its CUDA context exists."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_like.cluster.start import processes
from slime_like.cluster.start.processes import Cluster
from slime_like.config.schema.resolved import EngineSpec, Layout
from slime_like.errors import WorkerError
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like.train.megatron.platform import groups
from slime_like.util.ports import RendezvousAddress
from tests.train.models import make_spec


class ReachedEnd(Exception):
    """Raised in place of the rest of the start."""


@pytest.mark.parametrize(
    ("device", "colocated", "offload", "expected"),
    [
        ("cuda", True, False, ["engines", "trainer"]),  # SGLang measures free memory while it starts
        ("cuda", False, False, ["trainer", "engines"]),
        ("cpu", True, False, ["trainer", "engines"]),
        ("cpu", True, True, ["engines", "rollout"]),  # then their memory is released for the trainer
    ],
)
def test_engines_that_share_gpus_start_before_the_trainer(
    device: str,
    colocated: bool,
    offload: bool,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    events: list[str] = []
    plan = SimpleNamespace(needs_engines=True, colocated=colocated, device=device)
    placement = SimpleNamespace(
        open=lambda: SimpleNamespace(plan=plan, decisions=(), warnings=()),
        engine_template=lambda key: None,
        start_engines=lambda template: ["engine"],
        start_managers=lambda: None,
    )
    progress = SimpleNamespace(ready=lambda *_: None)

    def stop(*_: Any) -> None:
        events.append("rollout")
        raise ReachedEnd

    cfg = SimpleNamespace(placement=SimpleNamespace(offload_rollout=offload))
    monkeypatch.setattr(processes, "Placement", lambda *_: placement)
    monkeypatch.setattr(Cluster, "_start_trainer", lambda self, first: events.append("trainer"))
    monkeypatch.setattr(Cluster, "_wait_for_engines", lambda self: events.append("engines") or ())
    monkeypatch.setattr(Cluster, "_start_rollout", stop)
    cluster = Cluster(cast(Any, cfg), cast(Any, plan), tmp_path, cast(Any, progress), lambda line: None)
    with pytest.raises(ReachedEnd):
        cluster.start(*cast(Any, (None, 0, None, None, None, {})))
    assert events[:2] == expected


def test_engines_that_a_request_removed_are_not_causes_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def died(name: str, *_: object) -> str:
        raise WorkerError(f"{name} died", died=True)

    monkeypatch.setattr(processes, "call", lambda *_: None)
    monkeypatch.setattr(processes, "wait_one", died)
    cfg = SimpleNamespace(health=SimpleNamespace(on_dead_engine="stop"))
    engines = cast(Any, ("actor 0", "actor 1", "actor 2"))
    cluster = Cluster(cast(Any, cfg), cast(Any, None), tmp_path, cast(Any, None), lambda line: None, engines=engines)
    assert [cause.partition(":")[0] for cause in cluster.causes_of_death(suspected=False)] == [
        "engine 0",
        "engine 1",
        "engine 2",
    ]
    cluster.rollout = cast(Any, SimpleNamespace(fewest_engines=2))  # one was removed, even if others were added later
    assert [cause.partition(":")[0] for cause in cluster.causes_of_death(suspected=False)] == ["engine 0", "engine 1"]


def test_the_connection_limit_precedes_the_cuda_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def install(*_: Any) -> None:  # the guard's memory source creates the context
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        raise ReachedEnd

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr(groups.host, "install", lambda device: None)
    monkeypatch.setattr(groups, "share_gloo_device", lambda: None)
    monkeypatch.setattr(groups.install, "install", install)
    spec = make_spec(tmp_path, Layout(), device="cuda")
    with pytest.raises(ReachedEnd):
        groups.join_and_make_groups(spec, rank=0, world_size=1, master=RendezvousAddress("127.0.0.1", 1))


@pytest.mark.parametrize(("dtype", "backend"), [("float32", "triton"), ("bfloat16", None)])
def test_float32_engines_on_a_gpu_use_a_backend_that_has_float32(dtype: str, backend: str | None) -> None:
    spec = EngineSpec("m", "cuda", dtype, 1, 64, 0, "log", start_deadline_s=1)
    assert server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1)).get("attention_backend") == backend
    engine_spec = EngineSpec(
        "m", "cuda", dtype, 1, 64, 0, "log", start_deadline_s=1, sglang={"attention_backend": "own"}
    )
    assert server_arguments(EngineLaunch(engine_spec, "key", "127.0.0.1", 1))["attention_backend"] == "own"


@pytest.mark.parametrize(("device", "saves"), [("cuda", True), ("cpu", False)])
def test_only_engines_on_gpus_have_a_memory_saver(device: str, saves: bool, tmp_path: Path) -> None:
    spec = EngineSpec(str(tmp_path), device, "bfloat16", 1, 64, 0, "", 1.0, releases_memory=True)
    arguments = server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1))
    fields = ("enable_memory_saver", "enable_draft_weights_cpu_backup")
    assert [arguments.get(field, False) for field in fields] == [saves, saves]
    assert (arguments.get("cuda_graph_backend_prefill") == "disabled") == saves, "SGLang refuses to release such graphs"
