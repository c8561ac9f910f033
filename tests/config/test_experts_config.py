"""Rules of mixture-of-experts models: valid expert layouts, and one message for each invalid one."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.start.inputs import routing_shape
from slime_like.config.load.loader import load_config
from slime_like.config.rules.hf import read_hf_config
from slime_like.data.routing import RoutingShape
from slime_like.errors import CheckpointError
from slime_like_compat.flags.translate import translate
from tests.config.bad_input import refusal
from tests.config.model_folder import write_model

MACHINE = Machine(0, 8, 64 * 2**30, ())


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of eight experts, with the key that transformers writes for this family."""
    folder = tmp_path_factory.mktemp("sparse")
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return write_model(folder, model_type="qwen3_moe", **experts)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("parallel.ep=3 parallel.cp=3", ["parallel.ep=3", "8 experts", "set parallel.ep to one of 1, 2, 4, 8"]),
        (
            "parallel.ep=4 parallel.cp=2",
            ["parallel.ep=4", "2 ranks of a pipeline stage", "set parallel.ep to one of 1, 2"],
        ),
        (
            "parallel.tp=2 parallel.sequence_parallel=false",
            ["parallel.tp=2", "parallel.sequence_parallel=false", "set parallel.sequence_parallel=true"],
        ),
        (
            "algo=ppo rollout.n_samples_per_prompt=1 parallel.sequence_parallel=false critic.tp=2",
            ["critic.tp=2", "set parallel.sequence_parallel=true"],
        ),
        ("+model.megatron.moe_router_topk=1", ["model.megatron.moe_router_topk=1", "config.json"]),
        (
            "+model.megatron.moe_expert_capacity_factor=1.0",
            ["moe_expert_capacity_factor", "every token reaches its experts"],
        ),
        ("+model.megatron.moe_grouped_gemm=maybe", ["moe_grouped_gemm='maybe'", "expected bool"]),
        (
            "+model.megatron.expert_tensor_parallel_size=2",
            ["expert_tensor_parallel_size=2", "set it there", "parallel.etp"],
        ),
        (
            "parallel.ep=2 parallel.etp=2 parallel.cp=2",
            ["parallel.ep=2 * parallel.etp=2 = 4", "2 ranks of a pipeline stage", "set parallel.ep to one of 1"],
        ),
        ("parallel.etp=3 parallel.cp=2", ["parallel.etp=3", "2 ranks", "set parallel.etp to a divisor of 2"]),
        ("parallel.etp=5 parallel.cp=5", ["parallel.etp=5", "size 48 of the experts", "a divisor of 48"]),
        ("parallel.etp=0", ["parallel.etp=0"]),
    ],
)
def test_an_invalid_expert_layout_is_named(overrides: str, words: list[str], sparse: Path, argv: list[str]) -> None:
    with refusal(words):
        load_config([*argv, f"model.hf_checkpoint={sparse}", *overrides.split()])


def test_the_width_of_an_expert_may_be_the_intermediate_size(argv: list[str], tmp_path: Path) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}
    folder = write_model(tmp_path / "model", model_type="minimax_m2", **experts)
    with refusal(["parallel.etp=5", "size 48 of the experts", "a divisor of 48"]):
        load_config([*argv, f"model.hf_checkpoint={folder}", "parallel.etp=5", "parallel.cp=5"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("parallel.ep=2 parallel.cp=2", ["parallel.ep=2", "model_type qwen3", "no experts", "set parallel.ep=1"]),
        ("parallel.etp=2 parallel.cp=2", ["parallel.etp=2", "no experts", "set parallel.etp=1"]),
        (
            "model.recompute=selective model.recompute_modules=[moe]",
            ["model.recompute_modules=['moe']", "no experts", "remove moe"],
        ),
    ],
)
def test_a_model_without_experts_is_named(overrides: str, words: list[str], argv: list[str]) -> None:
    with refusal(words):
        load_config([*argv, *overrides.split()])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_a_tied_output_layer_that_sglang_does_not_read_is_named(family: str, tmp_path: Path, argv: list[str]) -> None:
    folder = write_model(tmp_path / "tied", model_type=family, tie_word_embeddings=True, num_experts=8)
    with pytest.raises(CheckpointError, match=rf"tie_word_embeddings=true, which SGLang's {family} does not read"):
        load_config([*argv, f"model.hf_checkpoint={folder}"])
    trained = [*argv, f"model.hf_checkpoint={folder}", "algo=sft", "rollout.n_samples_per_prompt=1"]
    assert load_config(trained).model.hf_checkpoint == str(folder)


@pytest.mark.parametrize("family", ["glm4", "llama", "mimo", "qwen2"])
def test_attention_groups_that_sglangs_model_ignores_are_refused(family: str, tmp_path: Path, argv: list[str]) -> None:
    folder = write_model(tmp_path / family, model_type=family)
    layout = [*argv, f"model.hf_checkpoint={folder}", "rollout.tp=2"]
    with refusal(["rollout.dp_attention=2", family, "rollout.num_engines"]):
        load_config([*layout, "rollout.dp_attention=2"])
    assert load_config(layout).rollout.tp == 2


def test_heads_are_split_over_the_ranks_of_an_attention_group(argv: list[str]) -> None:
    layout = [*argv, "rollout.tp=32"]
    with refusal(["rollout.tp=32", "attention heads"]):
        load_config(layout)
    with refusal(["rollout.tp / rollout.dp_attention=16", "attention heads"]):
        load_config([*layout, "rollout.dp_attention=2"])
    assert load_config([*layout, "rollout.dp_attention=16"]).rollout.tp == 32


REPLAY = "algo.routing_replay=rollout"
BLOCKED = {"speculative_algorithm": "EAGLE", "enable_hierarchical_cache": "true", "pp_size": "2"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("algo.routing_replay=engine", ["algo.routing_replay='engine'", "off, rollout, old"]),
        ("algo.routing_replay_reference=true", ["routing_replay_reference", "algo.routing_replay=off"]),
        (f"{REPLAY} algo.routing_replay_reference=true", ["without a reference", "algo.kl_loss_coef"]),
        (
            "algo.routing_replay=old algo.use_rollout_logprobs=true",
            ["algo.routing_replay=old", "algo.use_rollout_logprobs=true", "algo.routing_replay=rollout"],
        ),
        (
            f"{REPLAY} +rollout.sglang.enable_return_routed_experts=false",
            ["enable_return_routed_experts=false", REPLAY],
        ),
        (f"{REPLAY} +model.megatron.moe_router_fusion=true", ["moe_router_fusion", "remove"]),
        *((f"{REPLAY} +rollout.sglang.{field}={value}", [field]) for field, value in BLOCKED.items()),
    ],
)
def test_a_replay_that_cannot_work_is_named(overrides: str, words: list[str], sparse: Path, argv: list[str]) -> None:
    with refusal(words):
        load_config([*argv, f"model.hf_checkpoint={sparse}", *overrides.split()])


def test_a_model_without_a_choice_of_experts_is_named(tmp_path: Path, argv: list[str]) -> None:
    single = write_model(tmp_path / "one", model_type="qwen3_moe", num_local_experts=8, num_experts_per_tok=1)
    for model, word in (([], "has no experts"), ([f"model.hf_checkpoint={single}"], "num_experts_per_tok=1")):
        with refusal([REPLAY, word, "set algo.routing_replay=off"]):
            load_config([*argv, *model, REPLAY])


def test_engines_return_experts_only_if_they_are_replayed(sparse: Path, argv: list[str]) -> None:
    model = [*argv, f"model.hf_checkpoint={sparse}"]
    plans = {
        mode: make_plan(load_config([*model, f"algo.routing_replay={mode}"]), MACHINE)
        for mode in ("off", "rollout", "old")
    }
    assert {mode for mode, plan in plans.items() if plan.engines[0].returns_experts} == {"rollout"}
    assert {mode: plan.actor.routing_replay for mode, plan in plans.items()} == {
        "off": "off",
        "rollout": "rollout",
        "old": "off",
    }
    assert ("algo.routing_replay", "no effect") in [(d.key, d.value) for d in plans["old"].decisions]
    cfg = load_config([*model, REPLAY])
    hf = read_hf_config("model.hf_checkpoint", str(sparse))
    assert routing_shape(cfg, hf) == RoutingShape(hf.num_layers, 2, 8, tuple(range(hf.num_layers)))


def test_the_plan_shows_experts_per_rank(sparse: Path, argv: list[str]) -> None:
    layout = ["parallel.ep=2", "parallel.cp=2", "placement.actor_num_gpus_per_node=4"]
    cfg = load_config([*argv, f"model.hf_checkpoint={sparse}", *layout])
    plan = make_plan(cfg, MACHINE)
    assert (plan.actor.layout.ep, plan.actor.layout.dp) == (2, 2)
    decisions = {d.key: (d.value, d.reason) for d in plan.decisions}
    assert decisions["experts per rank"] == ("4", "8 experts / parallel.ep 2; copies of each: 2")


def test_the_plan_shows_shards_of_experts(sparse: Path, argv: list[str]) -> None:
    layout = ["parallel.ep=2", "parallel.etp=2", "parallel.tp=2", "placement.actor_num_gpus_per_node=4"]
    plan = make_plan(load_config([*argv, f"model.hf_checkpoint={sparse}", *layout]), MACHINE)
    assert (plan.actor.layout.ep, plan.actor.layout.etp, plan.actor.layout.dp) == (2, 2, 2)
    reasons = {d.key: d.reason for d in plan.decisions}
    assert reasons["experts per rank"] == "8 experts / parallel.ep 2, each over parallel.etp 2 ranks; copies of each: 1"


@pytest.mark.parametrize(("ep", "dense", "expected"), [("2", False, 2), ("2", True, 1), ("1", False, 1)])
def test_a_teacher_has_the_experts_of_its_own_model(
    ep: str, dense: bool, expected: int, sparse: Path, tmp_path: Path, argv: list[str]
) -> None:
    teacher = write_model(tmp_path / "teacher", num_hidden_layers=2, **({} if dense else {"num_experts": 8}))
    layout = [f"parallel.ep={ep}", "placement.actor_num_gpus_per_node=2"]
    roles = ["algo=distill", f"teacher.hf_checkpoint={teacher}", "teacher.placement=colocated"]
    cfg = load_config([*argv, f"model.hf_checkpoint={sparse}", *layout, *roles])
    spec = make_plan(cfg, MACHINE).teacher
    assert spec is not None
    assert spec.rank.layout.ep == expected


def test_flags_of_megatron_reach_their_keys() -> None:
    flags = [
        "--expert-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "4",
        "--moe-aux-loss-coeff",
        "0.001",
        "--moe-router-dtype",
        "fp32",
    ]
    assert translate(flags).overrides == (
        "parallel.ep=2",
        "parallel.etp=4",
        "model.megatron.moe_aux_loss_coeff=0.001",
        "model.megatron.moe_router_dtype='fp32'",
    )
