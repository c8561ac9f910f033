"""Folders of initial weights that are missing on the node of a rank."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.start import node_paths, processes
from slime_like.cluster.start.node_paths import check_node_paths, weight_paths
from slime_like.cluster.start.processes import Cluster
from slime_like.cluster.workers import trainer_worker
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.config.schema.resolved import CriticSpec, Layout, RankSpec, TeacherSpec
from slime_like.errors import CheckpointError
from slime_like.util.deadline import Deadline
from tests.train.models import make_spec


class RanksOfOneNode:
    """Fake group of two ranks on this node."""

    def __init__(self, role: str) -> None:
        self._names = [f"{role} rank {rank}" for rank in range(2)]

    def start(self, method: Any, paths: tuple[str, ...]) -> dict[str, Any]:
        return {name: method(object.__new__(RankWorker), paths) for name in self._names}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RankSpec:
    """Actor with a folder that exists."""
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "10.0.0.2")
    monkeypatch.setattr(node_paths, "wait_all", lambda refs, *_: refs)
    return make_spec(tmp_path, Layout())


def check(*groups: tuple[str, RankSpec | CriticSpec | TeacherSpec]) -> None:
    ranks: list[Any] = [(RanksOfOneNode(role), spec) for role, spec in groups]
    check_node_paths(ranks, Deadline("driver", "connect", 1))


def test_a_missing_folder_is_refused_with_its_key_and_node(spec: RankSpec, tmp_path: Path) -> None:
    check(("trainer", spec), ("critic", CriticSpec(spec, None, str(tmp_path), 0)), ("teacher", TeacherSpec(spec)))
    load = str(tmp_path / "critic" / "iter_0000003")
    with pytest.raises(CheckpointError) as error_info:
        check(("trainer", spec), ("critic", CriticSpec(spec, None, load, 0)))
    one_rank = re.escape(f"critic.load={load!r} does not exist on 10.0.0.2 (critic rank ")
    assert re.fullmatch(
        rf"{one_rank}0\); {one_rank}1\): copy the folder to the same path there, or use a .*", str(error_info.value)
    )


def test_each_role_needs_the_folders_that_it_reads(spec: RankSpec) -> None:
    model = replace(spec.model, hf_checkpoint="hf", megatron_checkpoint="megatron", ref_checkpoint="reference")
    actor = replace(spec, model=model, teacher_checkpoint="teacher")
    policy = {"hf": "model.hf_checkpoint", "megatron": "model.megatron_checkpoint", "teacher": "teacher.hf_checkpoint"}
    assert weight_paths(replace(actor, algo=replace(actor.algo, kl_loss_coef=0.0))) == policy
    reference = {"reference": "model.ref_checkpoint"}
    assert weight_paths(replace(actor, algo=replace(actor.algo, kl_loss_coef=0.1))) == policy | reference
    assert weight_paths(CriticSpec(actor, None, "value", 0)) == {"hf": "model.hf_checkpoint", "value": "critic.load"}
    teacher = replace(actor, model_key="teacher.hf_checkpoint")
    assert weight_paths(TeacherSpec(teacher)) == {"hf": "teacher.hf_checkpoint"}


def test_a_run_on_a_joined_cluster_checks_the_folders_of_every_role_before_a_model_is_built(
    spec: RankSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = CriticSpec(spec, None, None, 0)
    seconds = SimpleNamespace(start_deadline_s=1.0, step_deadline_s=1.0)
    cfg: Any = SimpleNamespace(placement=SimpleNamespace(ray_address="auto"), rollout=seconds, loop=seconds)
    plan: Any = SimpleNamespace(needs_trainer=True, actor=spec, critic=critic, teacher=None)
    progress: Any = SimpleNamespace(waiting=None)
    placement: Any = SimpleNamespace(start_trainers=lambda: (), start_role=lambda name: ())
    cluster = Cluster(cfg, plan, tmp_path, progress, lambda line: None)
    cluster.placement = placement

    def refuse(groups: Any, *_: Any) -> None:
        assert [(group.role, group_spec) for group, group_spec in groups] == [("trainer", spec), ("critic", critic)]
        raise CheckpointError("missing")

    monkeypatch.setattr(processes, "check_node_paths", refuse)
    monkeypatch.setattr(processes, "find_separate_nodes", pytest.fail)
    monkeypatch.setattr(processes, "connect", pytest.fail)
    with pytest.raises(CheckpointError, match="missing"):
        cluster._start_trainer(0)
