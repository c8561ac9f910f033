"""Plan: values that are auto are decided with a reason, and too small a machine is refused."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.plan.machine import Machine, numa_nodes, probe_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.transport import transport_on_nodes
from slime_like.cluster.plan.view import render_plan, show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules import attention
from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import ConfigError
from slime_like.util import gpus
from tests.config.bad_input import refusal
from tests.config.machines import LAPTOP, SERVER


def test_every_auto_is_resolved_on_a_laptop(plan) -> None:
    laptop = plan()
    assert (laptop.device, laptop.actor.dtype, laptop.actor.model.dtype) == ("cpu", "float32", "float32")
    assert (laptop.transport.kind, laptop.transport.backend) == ("tensor", "gloo")
    assert laptop.actor.model.family == "qwen3"
    assert laptop.actor.model.ref_checkpoint == laptop.actor.model.hf_checkpoint
    assert laptop.max_context_len == laptop.engines[0].context_length == 2048
    assert (laptop.samples_per_rollout, laptop.samples_per_step) == (256, 256)
    assert laptop.actor.optim.decay_steps == laptop.actor.num_steps == 100
    assert laptop.tolerances.probe == laptop.actor.sample_tolerance == 1e-4
    assert laptop.num_gpus == 0
    assert "auto" not in {decision.value for decision in laptop.decisions}
    decision_keys = {decision.key for decision in laptop.decisions}
    assert {"placement.device", "model.dtype", "weights.transport", "loop.global_batch_size"} <= decision_keys
    assert all(decision.reason for decision in laptop.decisions)


def test_a_server_gets_cuda_and_bfloat16(plan) -> None:
    server = plan("parallel.tp=2", "parallel.pp=2", "placement.actor_num_gpus_per_node=8", machine=SERVER)
    assert (server.device, server.actor.dtype, server.tolerances.probe, server.transport.backend) == (
        "cuda",
        "bfloat16",
        0.15,
        "nccl",
    )
    layout = server.actor.layout
    assert (layout.tp, layout.pp, layout.dp, layout.world_size, layout.sequence_parallel) == (2, 2, 2, 8, True)
    assert server.roles[0].devices == tuple((i,) for i in range(8))
    assert server.roles[1].devices == ((0,),)
    assert server.num_gpus == 8


def test_transformer_engine_needs_a_gpu_and_its_package(plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: True)
    assert plan("model.attention=te", machine=SERVER).actor.model.attention == "te"
    with pytest.raises(ConfigError, match=r"model\.attention=te on a CPU: .*set model\.attention=auto"):
        plan("model.attention=te")  # placement.device=auto without a GPU
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.attention=te, but transformer_engine is not installed.*pip install"):
        plan("model.attention=te", machine=SERVER)


def test_another_machine_may_have_transformer_engine(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_transformer_engine", lambda: False)
    load_config([*argv, "model.attention=te", "placement.ray_address=auto"])
    cfg = load_config([*argv, "model.attention=te"], machine=False)
    assert make_plan(cfg, replace(SERVER, is_local=False)).actor.model.attention == "te"


def test_context_parallel_ranks_are_part_of_one_copy_of_the_model(plan) -> None:
    layout = plan("parallel.tp=2", "parallel.cp=2", "placement.actor_num_gpus_per_node=8", machine=SERVER).actor.layout
    assert (layout.tp, layout.cp, layout.dp, layout.world_size) == (2, 2, 2, 8)
    assert len(plan("parallel.cp=2").roles[0].devices) == 2


def test_split_engines_follow_the_trainer(plan) -> None:
    split = plan("placement.mode=split", "parallel.tp=4", "rollout.num_engines=2", "rollout.tp=2", machine=SERVER)
    assert split.roles[1].devices == ((4, 5), (6, 7))
    assert (split.transport.kind, split.colocated, split.num_gpus) == ("broadcast", False, 8)


@pytest.mark.parametrize(
    "setting", ["expandable_segments:True", "backend:native,expandable_segments:True", "backend:cudaMallocAsync"]
)
def test_weights_go_over_cuda_ipc_unless_the_allocator_prevents_it(
    plan, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(machine=SERVER).transport.kind == "ipc"
    assert plan("weights.transport=tensor", machine=SERVER).transport.kind == "tensor"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    prevented = plan(machine=SERVER)
    assert prevented.transport.kind == "tensor"
    (reason,) = (decision.reason for decision in prevented.decisions if decision.key == "weights.transport")
    assert f"PYTORCH_ALLOC_CONF={setting}" in reason
    with pytest.raises(ConfigError, match=r"weights.transport=ipc with PYTORCH_ALLOC_CONF=.*weights.transport=tensor"):
        plan("weights.transport=ipc", machine=SERVER)
    assert plan(machine=replace(SERVER, is_local=False)).transport.kind == "ipc", (
        "a described machine has no environment"
    )


def test_cuda_ipc_needs_a_gpu(plan) -> None:
    with pytest.raises(
        ConfigError, match=r"weights.transport=ipc with placement.device=auto.*transport=auto or tensor"
    ):
        plan("weights.transport=ipc")


def test_cuda_ipc_needs_engines_on_one_node(plan) -> None:
    four_nodes = replace(SERVER, is_local=False, nodes=4)
    settings = (
        "placement.ray_address=auto",
        "placement.actor_num_nodes=4",
        "placement.actor_num_gpus_per_node=2",
        "rollout.tp=4",
    )
    run_plan = plan(*settings, machine=four_nodes)
    assert (run_plan.engines[0].num_nodes, run_plan.transport.kind) == (2, "tensor")
    refusal = r"weights.transport=ipc with engines on 2 nodes each.*weights.transport=auto or tensor"
    with pytest.raises(ConfigError, match=refusal):
        plan(*settings, "weights.transport=ipc", machine=four_nodes)


@pytest.mark.parametrize(
    ("kind", "num_nodes", "expected"), [("ipc", 1, "ipc"), ("ipc", 2, "tensor"), ("broadcast", 2, "broadcast")]
)
def test_a_cluster_decides_the_nodes_of_engines_after_their_transport(kind: str, num_nodes: int, expected: str) -> None:
    cfg: Any = SimpleNamespace(weights=SimpleNamespace(transport="auto"))
    assert transport_on_nodes(cfg, TransportSpec(kind, "nccl", 1, 1.0), num_nodes).kind == expected


def test_explicit_values_stay(plan) -> None:
    explicit = plan(
        "model.dtype=bfloat16", "weights.probe_tolerance=0.5", "rollout.max_context_len=1500", "weights.bucket_mb=2"
    )
    assert (explicit.actor.dtype, explicit.tolerances.probe, explicit.max_context_len) == ("bfloat16", 0.5, 1500)
    assert explicit.transport.max_bytes == 2 * 2**20
    keys = {decision.key for decision in explicit.decisions}
    assert not keys & {"model.dtype", "weights.probe_tolerance", "rollout.max_context_len"}


def test_the_sample_tolerance_follows_device_dtype_and_mode(plan, tmp_path: Path) -> None:
    def tolerance(*overrides: str, **kwargs: Machine) -> float | None:
        return plan(*overrides, **kwargs).actor.sample_tolerance

    assert tolerance("model.dtype=float32", machine=SERVER) == 1e-3
    assert tolerance("model.dtype=bfloat16") == tolerance("weights.sample_tolerance=inf") == math.inf
    assert tolerance("model.dtype=bfloat16", "weights.sample_tolerance=0.5") == 0.5
    replayed = ("run.mode=train_only", f"run.replay_from={tmp_path}")
    assert tolerance(*replayed) == tolerance(*replayed, "weights.sample_tolerance=1e-3") is None
    layers = plan("weights.probe_layers=true").actor
    assert layers.drift_by_layer and not plan().actor.drift_by_layer


def test_modes_omit_unneeded_roles(plan, tmp_path: Path) -> None:
    rollout_only = plan("run.mode=rollout_only", "placement.mode=split", machine=SERVER)
    assert [role.name for role in rollout_only.roles] == ["engine"]
    assert (rollout_only.needs_trainer, rollout_only.roles[0].devices, rollout_only.colocated) == (False, ((0,),), True)
    train_only = plan("run.mode=train_only", f"run.replay_from={tmp_path}")
    assert (train_only.needs_engines, [role.name for role in train_only.roles]) == (False, ["trainer"])
    sft = plan("algo=sft", "rollout.n_samples_per_prompt=1", "rollout.temperature=0.7")
    assert (sft.needs_engines, sft.actor.temperature) == (False, 1.0)


def test_scores_follow_the_algorithm(plan) -> None:
    assert not plan().actor.needs_reference
    assert plan("algo.kl_loss_coef=0.1").actor.needs_reference
    assert plan("algo=reinforce_pp", "algo.kl_coef=0.1").actor.needs_reference
    assert plan("loop.steps_per_rollout=2").actor.needs_old_logprobs
    sft = ("algo=sft", "rollout.n_samples_per_prompt=1", "loop.steps_per_rollout=2")
    assert not plan(*sft).actor.needs_old_logprobs
    assert plan(*sft, "algo.loss=tests.config.own_algorithm:Reinforce").actor.needs_old_logprobs


def test_threads_are_shared_by_concurrent_processes(plan) -> None:
    machine = Machine(0, 8, 64 * 2**30, ())
    turns = plan(machine=machine)
    assert (turns.trainer_threads, turns.engine_threads) == (8, 8)
    split = plan("placement.mode=split", "parallel.tp=2", machine=machine)
    assert (split.trainer_threads, split.engine_threads) == (4, 8)
    engines = plan("rollout.num_engines=4", machine=machine)
    assert (engines.trainer_threads, engines.engine_threads) == (8, 2)
    overlap = plan(
        "placement.mode=split", "parallel.tp=2", "rollout.num_engines=2", "loop.max_staleness=1", machine=machine
    )
    assert (overlap.trainer_threads, overlap.engine_threads) == (2, 2)


@pytest.mark.parametrize(
    ("extra", "machine", "words"),
    [
        (["placement.device=cuda"], LAPTOP, ["placement.device=cuda", "no GPU", "placement.device=cpu"]),
        (
            ["rollout.num_engines=2"],
            SERVER,
            ["rollout.num_engines 2 * rollout.tp 1 = 2 GPUs", "has 1", "rollout.num_engines=1"],
        ),
        (
            ["placement.mode=split", "parallel.tp=4", "parallel.pp=2", "rollout.num_engines=2"],
            SERVER,
            ["needs 10 GPUs", "trainers 8, engines 2", "8 are visible"],
        ),
        (["rollout.num_engines=100"], LAPTOP, ["GiB of memory", "101 processes", "16.0 GiB"]),
    ],
)
def test_a_machine_that_is_too_small_is_refused(plan, extra: list[str], machine: Machine, words: list[str]) -> None:
    with refusal(words):
        plan(*extra, machine=machine)


def test_a_model_made_by_prepare_can_be_planned(argv: list[str]) -> None:
    argv = ["model.hf_checkpoint=/no/such", "data.train=x.jsonl", "run.prepare=json:dump"]
    with pytest.raises(ConfigError, match=r"set rollout\.max_context_len"):
        show_plan(argv)
    text = show_plan([*argv, "rollout.max_response_len=8", "rollout.max_context_len=64"])
    assert "written by run.prepare" in text


def test_a_plan_refuses_a_reward_that_cannot_be_called(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.name=.* cannot be called as reward\(prompt, sample\)"):
        show_plan([*argv, "reward.name=tests.reward.rewards_of_users:three_arguments"])


def test_the_printed_plan_names_numbers_and_reasons(argv: list[str]) -> None:
    cfg = load_config(
        [*argv, "parallel.tp=2", "placement.mode=split", "loop.steps_per_rollout=2", "algo.kl_loss_coef=0.1"]
    )
    text = render_plan(cfg, make_plan(cfg, SERVER), SERVER)
    for words in (
        "split on cuda, 3 GPUs",
        "2 x (tp 2 * pp 1 * cp 1 * dp 1) on GPUs 0 1",
        "1 x (tp 1 each, context 2048) on GPUs 2",
        "32 * n_samples_per_prompt 8 = 256 = global_batch_size 128 * steps_per_rollout 2",
        "log-probabilities used: rollout, old, reference",
        "weights.transport",
        "placement.mode is split",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("variable", "num_visible"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("1,2", 2),
        ("0,7,1", 1),
        ("GPU-8932,GPU-1", 2),
        ("0,1,00", 0),
        ("GPU-1,GPU-1", 0),
        ("0,7,0", 1),
    ],
)
def test_cuda_visible_devices(variable: str | None, num_visible: int) -> None:
    assert len(gpus.visible(("A", "B", "C"), variable)) == num_visible


def test_only_mig_entries_are_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = gpus.Gpu("H100", (9, 0), 80 * 2**30), gpus.Gpu("L4", (8, 9), 24 * 2**30)
    monkeypatch.setattr(gpus, "installed_gpus", lambda: (large, small))
    slice_of_large = gpus.Gpu("H100 MIG", (9, 0), None)
    expected = {
        "1, MIG-8932,0": (small, slice_of_large, large),
        "MIG-8932,7,1": (slice_of_large,),
        "GPU-MIG1": (large,),
    }
    for variable, visible in expected.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert gpus.visible_gpus() == visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus.visible_gpus() == (large, small)


def test_nvidia_smi_is_read() -> None:
    full = gpus.parse("NVIDIA H100 80GB HBM3, 81559 MiB, 9.0")
    assert full == gpus.Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559 * 2**20)
    assert gpus.parse("Tesla M60, 7680 MiB, [N/A]") == gpus.Gpu("Tesla M60", None, 7_680 * 2**20)
    assert gpus.parse("NVIDIA GB10, [N/A], 12.1") == gpus.Gpu("NVIDIA GB10", (12, 1))
    assert gpus.parse("Tesla M60") == gpus.Gpu("Tesla M60")


def test_this_machine_is_probed() -> None:
    machine = probe_machine()
    assert machine.cpu_count >= 1
    assert machine.memory_bytes > 2**30
    assert len(machine.gpu_names) == machine.num_gpus
    assert machine.numa_nodes >= 1


def test_numa_nodes_are_those_with_a_usable_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cores in (("node0", "0-3,8"), ("node1", "4-7,9\n"), ("node2", ""), ("possible", "0-2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    for usable_cpus, nodes in (({0}, 1), ({8, 9}, 2), ({4, 5}, 1), ({64}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, usable_cpus=usable_cpus: usable_cpus)
        assert numa_nodes(tmp_path) == nodes
    assert numa_nodes(tmp_path / "absent") == 1


def test_gpus_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "GPU_QUERY", ("/no/such/program",))
    assert len(gpus.installed_gpus()) == len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def test_options_without_effect_are_accepted_and_reported(plan) -> None:
    with_options = plan(
        "optim.cpu_offload=true",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        "placement.actor_num_gpus_per_node=2",
    )
    reasons = {d.key: (d.value, d.reason) for d in with_options.decisions}
    assert reasons["optim.cpu_offload"][0] == reasons["parallel.overlap_param_gather"][0] == "no effect"
    assert "host memory" in reasons["optim.cpu_offload"][1]
    assert "loop.steps_per_rollout is 1" in reasons["parallel.overlap_param_gather"][1]
    one_rank = plan("parallel.overlap_grad_reduce=true")
    assert {d.key: d.value for d in one_rank.decisions}["parallel.overlap_grad_reduce"] == "no effect"
    layout = with_options.actor.layout
    assert (layout.overlap_grad_reduce, layout.overlap_param_gather, layout.bucket_size) == (True, True, None)


def test_a_schedule_is_converted_to_steps(plan) -> None:
    with_schedule = plan("optim.schedule=wsd", "optim.warmup_fraction=0.05")
    optim = with_schedule.actor.optim
    assert (optim.warmup_steps, optim.decay_steps, optim.wsd_decay_steps) == (5, 100, 10)
    values = {d.key: d.value for d in with_schedule.decisions}
    assert (values["optim.warmup_steps"], values["optim.wsd_decay_steps"]) == ("5", "10")


def test_float32_weights_are_not_offloaded_from_a_gpu(plan) -> None:
    with pytest.raises(ConfigError, match=r"optim\.cpu_offload=true with model\.dtype=float32.*model\.dtype=bfloat16"):
        plan("optim.cpu_offload=true", "model.dtype=float32", machine=SERVER)
    assert plan("optim.cpu_offload=true", machine=SERVER).actor.optim.cpu_offload
