"""critic.* and teacher.*: their roles in the plan, and one message for each invalid setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.checkpoint.record import Manifest, write_manifest
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import render_plan
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like_compat.flags.translate import translate
from tests.config.bad_input import refusal
from tests.config.machines import LAPTOP, SERVER
from tests.config.model_folder import SHAPE, write_model


def test_the_critic_is_a_role_with_the_actors_layout(plan) -> None:
    run_plan = plan("algo=ppo", "parallel.tp=2", "critic.warmup_rollouts=10", "critic.lr=1e-5")
    assert [(role.name, len(role.devices)) for role in run_plan.roles] == [("trainer", 2), ("engine", 1), ("critic", 2)]
    assert run_plan.critic is not None
    assert run_plan.critic.rank.layout == replace(run_plan.actor.layout, segments=())
    assert (run_plan.critic.rank.optim.lr, run_plan.actor.optim.lr) == (1e-5, 1e-6)
    assert (run_plan.critic.rank.num_steps, run_plan.actor.num_steps) == (100, 90)
    assert run_plan.trainer_threads == 1  # actor and critic train concurrently
    assert "critic rank" in run_plan.summary
    assert plan("algo=grpo").critic is None
    assert plan("algo=ppo", "run.mode=rollout_only").critic is None


def test_virtual_and_uneven_segments_apply_to_the_actor_only(plan) -> None:
    for split in ("parallel.vpp=2", "parallel.first_stage_layers=1"):
        run_plan = plan("algo=ppo", "parallel.pp=2", split)
        assert len(set(run_plan.actor.layout.segments)) > 1 or run_plan.actor.layout.vpp == 2
        assert run_plan.critic is not None
        layout = run_plan.critic.rank.layout
        assert (layout.pp, layout.vpp, layout.segments) == (2, 1, ())


def test_a_critic_warmup_error_names_its_own_key(plan) -> None:
    argv = ("algo=ppo", "critic.lr_warmup_steps=50", "optim.schedule=linear", "optim.decay_steps=40")
    with pytest.raises(ConfigError, match=r"^critic.lr_warmup_steps=50 leaves none of 40 optimizer steps"):
        plan(*argv)


def test_a_critic_has_its_own_layout_and_devices(plan) -> None:
    run_plan = plan("algo=ppo", "parallel.tp=4", "critic.tp=2", "critic.dp=2", "critic.placement=split", machine=SERVER)
    assert run_plan.roles[-1].devices == ((4,), (5,), (6,), (7,))
    assert (run_plan.critic.rank.layout.tp, run_plan.critic.rank.layout.dp, run_plan.num_gpus) == (2, 2, 8)
    shared = plan("algo=ppo", "parallel.tp=4", "critic.tp=2", machine=SERVER)
    assert (shared.roles[-1].devices, shared.num_gpus) == (((0,), (1,)), 4)
    unsplit = plan("algo=ppo", "parallel.tp=4", "critic.tp=1", machine=SERVER)
    assert shared.actor.layout.sequence_parallel and shared.critic.rank.layout.sequence_parallel
    assert unsplit.actor.layout.sequence_parallel and not unsplit.critic.rank.layout.sequence_parallel


def test_a_teacher_is_swapped_in_or_a_role(plan, model: Path, tmp_path: Path) -> None:
    swapped_plan = plan("algo=distill", f"teacher.hf_checkpoint={model}")
    assert (swapped_plan.teacher, swapped_plan.actor.teacher_checkpoint) == (None, str(model))
    assert not swapped_plan.actor.needs_old_logprobs
    deeper = write_model(tmp_path / "deeper", num_hidden_layers=6)
    separate = plan("algo=distill", f"teacher.hf_checkpoint={deeper}", "teacher.tp=2")
    assert separate.teacher is not None
    assert (separate.teacher.rank.layout.tp, separate.actor.swaps_teacher) == (2, False)
    assert (separate.roles[-1].name, len(separate.roles[-1].devices)) == ("teacher", 2)
    reasons = {decision.key: decision.reason for decision in separate.decisions}
    assert "num_hidden_layers (6 and 4)" in reasons["teacher.placement"]


def test_the_printed_plan_shows_the_roles(argv: list[str]) -> None:
    cfg = load_config([*argv, "algo=ppo", "critic.dp=2"])
    text = render_plan(cfg, make_plan(cfg, LAPTOP), LAPTOP)
    assert "critic   2 x (tp 1 * pp 1 * cp 1 * dp 2)" in text
    assert "a fresh value head" in text


def actors_checkpoint(folder: Path) -> Path:
    """Write the manifest of an actor's iteration."""
    (folder / "iter_0000003").mkdir(parents=True)
    manifest = Manifest(3, 3, 3, 1e-6, 0.0, True, {"tp": 1}, {"model_type": "qwen3", "head": "vocabulary"})
    write_manifest(folder / "iter_0000003", manifest)
    return folder


def critics_checkpoint(folder: Path, **changes: int) -> Path:
    """Write the manifest of a critic's iteration for the ``SHAPE`` model with ``changes``."""
    (folder / "iter_0000003").mkdir(parents=True)
    body = {name: SHAPE[name] for name in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")}
    content = {**body, "head": "value", "tie_word_embeddings": False, "padded_vocabulary": 128, **changes}
    write_manifest(folder / "iter_0000003", Manifest(3, 3, 3, 1e-6, 0.0, True, {"tp": 1}, content))
    return folder


BAD = {
    "a critic without ppo": (["critic.lr=1e-5"], ["critic.lr=1e-05 has no effect", "algo=ppo"]),
    "a teacher without distill": (["teacher.tp=2"], ["teacher.tp=2 has no effect", "algo=distill"]),
    "no teacher": (["algo=distill"], ["algo=distill", "set teacher.hf_checkpoint"]),
    "only warm-up": (
        ["algo=ppo", "critic.warmup_rollouts=100"],
        ["critic.warmup_rollouts=100", "num_rollout=100", "lower critic.warmup_rollouts", "raise loop.num_rollout"],
    ),
    "swap with a layout": (
        ["algo=distill", "teacher.hf_checkpoint=MODEL", "teacher.placement=swap", "teacher.tp=2"],
        ["teacher.tp=2", "teacher.placement=swap"],
    ),
    "swap of a different shape": (
        ["algo=distill", "teacher.hf_checkpoint=DEEPER", "teacher.placement=swap"],
        ["num_hidden_layers (6 and 4)", "teacher.placement=colocated"],
    ),
    "another vocabulary": (["algo=distill", "teacher.hf_checkpoint=WIDER"], ["vocabulary of 256", "has 128"]),
    "another tokenizer": (
        ["algo=distill", "teacher.hf_checkpoint=TOKENIZED", "model.hf_checkpoint=OTHER_TOKENS"],
        ["vocabulary of 3 tokens", "has 2", "'b' is token 2 of the teacher and 1 of the student"],
    ),
    "a critic's other vocabulary": (["algo=ppo", "critic.hf_checkpoint=WIDER"], ["256 tokens", "128"]),
    "heads": (["algo=ppo", "critic.tp=3"], ["critic.tp=3", "8 attention heads"]),
    "the actor's tp": (
        ["algo=distill", "teacher.hf_checkpoint=FEW_HEADS", "parallel.tp=2"],
        ["teacher.tp=2", "1 key/value heads", "lower teacher.tp"],
    ),
    "the actor's pp": (
        ["algo=distill", "teacher.hf_checkpoint=SHALLOW", "parallel.pp=2"],
        ["teacher.pp=2", "1 layers", "lower teacher.pp"],
    ),
    "no folder": (["algo=ppo", "critic.load=/no/such"], ["critic.load='/no/such'", "not a folder"]),
    "a critic's other body": (
        ["algo=ppo", "critic.load=CRITIC", "critic.hf_checkpoint=DEEPER"],
        [
            "iter_0000003 was saved from another model: its num_hidden_layers is 4, but 6 in critic.hf_checkpoint=",
            "deeper",
        ],
    ),
    "another policy's critic": (
        ["algo=ppo", "critic.load=DEEP_CRITIC"],
        ["iter_0000003 was saved from another model: its num_hidden_layers is 6, but 4 in model.hf_checkpoint="],
    ),
    "a critic padded otherwise": (
        ["algo=ppo", "critic.load=PADDED_CRITIC"],
        ["iter_0000003: its vocabulary is padded to 384 rows, but tp=1 pads it to 128", "resume with the same tp"],
    ),
    "no value head": (["algo=ppo", "critic.load=ACTOR"], ["iter_0000003: has no value head", "critic.load"]),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_roles_are_refused_at_load(name: str, argv: list[str], model: Path, tmp_path: Path) -> None:
    extra, words = BAD[name]
    folders = {
        "DEEPER": write_model(tmp_path / "deeper", num_hidden_layers=6),
        "SHALLOW": write_model(tmp_path / "shallow", num_hidden_layers=1),
        "FEW_HEADS": write_model(tmp_path / "few_heads", num_key_value_heads=1),
        "WIDER": write_model(tmp_path / "wider", vocab_size=256),
        "TOKENIZED": write_model(tmp_path / "tokenized"),
        "OTHER_TOKENS": write_model(tmp_path / "other"),
        "ACTOR": actors_checkpoint(tmp_path / "checkpoints"),
        "CRITIC": critics_checkpoint(tmp_path / "critic"),
        "DEEP_CRITIC": critics_checkpoint(tmp_path / "deep_critic", num_hidden_layers=6),
        "PADDED_CRITIC": critics_checkpoint(tmp_path / "padded_critic", padded_vocabulary=384),
        "MODEL": model,
    }
    for key, vocabulary in (("TOKENIZED", {"a": 0, "c": 1, "b": 2}), ("OTHER_TOKENS", {"a": 0, "b": 1})):
        (folders[key] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    overrides = []
    for text in extra:
        key, _, value = text.partition("=")
        overrides.append(f"{key}={folders.get(value, value)}")
    with refusal(words, SlimeLikeError):
        load_config([*argv, *overrides])


def test_a_critics_checkpoint_fits_a_tied_policy_and_any_optimizer(plan, tmp_path: Path) -> None:
    """A critic's embeddings are not tied, and the kind of optimizer does not matter if only weights are loaded."""
    load = critics_checkpoint(tmp_path / "critic")
    tied_model = write_model(tmp_path / "tied", tie_word_embeddings=True)
    run_plan = plan(
        f"model.hf_checkpoint={tied_model}", "algo=ppo", f"critic.load={load}", "parallel.distributed_optimizer=false"
    )
    assert run_plan.critic.load == str(load / "iter_0000003")


def test_messages_of_a_role_name_its_own_key(plan, model: Path) -> None:
    assert plan("algo=ppo").critic.rank.model_key == "model.hf_checkpoint"
    assert plan("algo=ppo", f"critic.hf_checkpoint={model}").critic.rank.model_key == "critic.hf_checkpoint"


def test_slime_flags_of_critic_and_teacher() -> None:
    ppo = translate(
        ["--advantage-estimator", "ppo", "--critic-lr", "1e-5", "--num-critic-only-steps", "2", "--lambd", "0.9"]
    )
    assert set(ppo.overrides) >= {"algo=ppo", "critic.lr=1e-05", "critic.warmup_rollouts=2", "algo.lambd=0.9"}
    opd = translate(
        ["--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "t", "--advantage-estimator", "dr_grpo"]
    )
    assert list(opd.overrides[:2]) == ["algo=distill", "algo.group_advantage=dr_grpo"]
    assert "teacher.hf_checkpoint='t'" in opd.overrides
    with pytest.raises(ConfigError, match="--opd-type megatron"):
        translate(["--use-opd", "--opd-type", "sglang"])
    with pytest.raises(ConfigError, match="--advantage-estimator ppo is not supported yet"):
        translate(["--use-opd", "--opd-type", "megatron", "--advantage-estimator", "ppo"])
