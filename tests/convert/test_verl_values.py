"""verl's settings: each value is mapped to an equivalent key and value, or refused; an invalid one gives one message."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like_compat.verl_keys import VERL_KEYS
from tests.config.bad_input import refusal
from tests.convert.verl_lines import FILTER, METRIC, OVERLONG, REWARD, A, C, M, R, mapped, refusals, translated, value

EQUAL_VALUES = {
    "": {"algo.eps_clip": 0.2, "algo.eps_clip_high": 0.2, "algo.eps_clip_c": 3.0, "optim.weight_decay": 0.01},
    "algorithm.norm_adv_by_std_in_grpo=False": {"algo.name": "grpo", "algo.group_advantage": "dr_grpo"},
    "algorithm.adv_estimator=grpo_vectorized algorithm.norm_adv_by_std_in_grpo=False": {"algo.group_advantage": "grpo"},
    "algorithm.adv_estimator=rloo": {"algo.name": "rloo", "algo.group_advantage": "rloo"},
    "algorithm.adv_estimator=reinforce_plus_plus algorithm.gamma=0.9": {"algo.name": "reinforce_pp", "algo.gamma": 0.9},
    "algorithm.adv_estimator=reinforce_plus_plus_baseline": {"algo.name": "reinforce_pp_baseline"},
    f"{A}.policy_loss.loss_mode=gspo {A}.clip_ratio_low=3e-4 {A}.clip_ratio_high=4e-4 {A}.clip_ratio_c=10": {
        "algo.name": "gspo",
        "algo.eps_clip": 3e-4,
        "algo.eps_clip_c": None,
        "algo.aggregation": "sequence_mean",
    },
    f"{A}.policy_loss.loss_mode=cispo {A}.clip_ratio_low=10": {"algo.name": "cispo", "algo.eps_clip": 10.0},
    f"{A}.clip_ratio=0.3 {A}.clip_ratio_low=null {A}.clip_ratio_high=null": {"algo.eps_clip_high": 0.3},
    f"{A}.clip_ratio=0.3": {"algo.eps_clip": 0.2},
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm": {"algo.aggregation": "dr_grpo"},
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=512": {"algo.aggregation": "dr_grpo"},
    f"{A}.use_kl_loss=True {A}.kl_loss_type=k3": {"algo.kl_loss_coef": 0.001, "algo.kl_loss_type": "low_var_kl"},
    f"{A}.use_kl_loss=True {A}.kl_loss_coef=0.01 {A}.kl_loss_type=mse": {"algo.kl_loss_type": "k2"},
    f"{A}.kl_loss_coef=0.1": {"algo.kl_loss_coef": 0.0},
    f"{A}.entropy_coeff=0.01": {"algo.entropy_coef": 0.01},
    f"{C}.rollout_is=token {C}.rollout_is_threshold=3": {"algo.use_tis": True, "algo.tis_clip": 3.0},
    f"{C}.rollout_is=token {C}.rollout_is_threshold='0.5_5.0'": {
        "algo.use_mis": True,
        "algo.mis_low": 0.5,
        "algo.mis_high": 5.0,
    },
    f"{C}.rollout_rs=seq_sum_k1 {C}.rollout_rs_threshold='0.5_4.0'": {
        "algo.rejection": "product",
        "algo.rejection_low": 0.25,
        "algo.rejection_high": 2.0,
    },
    f"{C}.rollout_rs=seq_mean_k1 {C}.rollout_rs_threshold=2.0": {
        "algo.rejection": "geometric",
        "algo.rejection_low": 0.5,
        "algo.rejection_high": 2.0,
    },
    f"{C}.bypass_mode=True {C}.rollout_is=token": {"algo.use_rollout_logprobs": True, "algo.use_tis": False},
    f"{A}.optim.lr_warmup_steps=-1 {A}.optim.lr_warmup_steps_ratio=0.1": {
        "optim.warmup_steps": 0,
        "optim.warmup_fraction": 0.1,
    },
    f"{A}.optim.lr_warmup_steps=0 {A}.optim.lr_warmup_steps_ratio=0.1": {"optim.warmup_fraction": 0.1},
    f"{A}.optim.lr_warmup_steps=2 {A}.optim.lr_warmup_steps_ratio=0.5": {"optim.warmup_steps": 8},
    f"{A}.optim.lr_scheduler_type=cosine {A}.optim.min_lr_ratio=0.1": {
        "optim.schedule": "cosine",
        "optim.min_lr": 1e-7,
    },
    f"{A}.optim.lr_decay_style=WSD {A}.optim.lr_wsd_decay_steps=2": {
        "optim.schedule": "wsd",
        "optim.wsd_decay_steps": 8,
    },
    f"{A}.optim.lr_decay_steps=1000000": {"optim.schedule": "constant", "optim.decay_steps": None},
    f"{A}.ulysses_sequence_parallel_size=2": {"parallel.cp": 2},
    f"{A}.ppo_micro_batch_size_per_gpu=3": {"parallel.max_tokens_per_rank": 3 * 1024},
    f"{R}.response_length=100 data.max_response_length=200": {"rollout.max_response_len": 100},
    f"{R}.max_model_len=900": {"rollout.max_context_len": 900},
    f"{FILTER} {METRIC}=acc algorithm.filter_groups.max_num_gen_batches=10": {
        "rollout.filters": ["nonzero_std"],
        "rollout.max_refills": 1_000_000,
    },
    "trainer.nnodes=2 trainer.n_gpus_per_node=4": {"placement.ray_address": "auto", "rollout.num_engines": 4},
    f"trainer.v1.trainer_mode=separate_async {R}.nnodes=1 {R}.n_gpus_per_node=4 trainer.v1.sampler."
    "max_off_policy_threshold=2 trainer.v1.separate_async.num_warmup_batches=3": {
        "placement.mode": "split",
        "loop.max_staleness": 1,
        "rollout.num_engines": 2,
    },
    "algorithm.adv_estimator=gae trainer.critic_warmup=3 critic.optim.lr_warmup_steps=1 critic.optim.lr=2e-5": {
        "algo.name": "ppo",
        "critic.warmup_rollouts": 2,
        "critic.lr_warmup_steps": 4,
        "critic.lr": 2e-5,
        "critic.value_clip": 0.5,
    },
    f"algorithm.adv_estimator=gae {A}.optim.weight_decay=0.1 critic.optim.weight_decay=0.1 {A}.optim.betas=[0.9,0.95] "
    f"critic.optim.betas=[0.9,0.95] {A}.optim.lr_scheduler_type=cosine critic.optim.lr_scheduler_type=cosine "
    f"{A}.grad_clip=0.2 critic.grad_clip=0.2": {"algo.name": "ppo", "optim.weight_decay": 0.1, "optim.beta2": 0.95},
    "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl": {
        "algo.kl_coef": 0.001,
        "algo.kl_reward_type": "low_var_kl",
    },
    "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True trainer.critic_warmup=1": {
        "algo.kl_reward_type": "k1",
        "critic.warmup_rollouts": 0,
    },
    "data.val_files=[a/gsm8k/test.parquet] trainer.test_freq=5": {
        "evaluation.datasets": {"gsm8k": "a/gsm8k/test.parquet"},
        "evaluation.temperature": 0.0,
        "evaluation.interval": 5,
    },
    "data.val_files=v.parquet trainer.val_before_train=False": {"evaluation.datasets": {}},
    "data.shuffle=False data.seed=7": {"data.shuffle": False, "run.seed": 7},
    OVERLONG: {"reward.overlong_buffer_len": 64, "reward.overlong_penalty_factor": 0.5},
    OVERLONG.replace("reward.reward_manager.name=", "reward_model.reward_manager="): {"reward.overlong_buffer_len": 64},
    OVERLONG.replace("=dapo", "=naive"): {"reward.overlong_buffer_len": None},
    "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64 "
    "reward_model.overlong_buffer.penalty_factor=0.5": {
        "reward.overlong_buffer_len": 64,
        "reward.overlong_penalty_factor": 0.5,
    },
    f"{FILTER} {METRIC}=seq_final_reward": {"rollout.filters": ["nonzero_std"]},
    f"{FILTER} {METRIC}=reward {OVERLONG.replace('=dapo', '=naive')}": {"rollout.filters": ["nonzero_std"]},
    f"{C}.rollout_is=token {C}.rollout_rs=seq_sum_k1 {R}.calculate_log_probs=False": {
        "algo.use_tis": False,
        "algo.rejection": "none",
    },
    "data.val_files=null": {"evaluation.datasets": {}},
    f"{M}.override_transformer_config={{moe_aux_loss_coeff:0.02}}": {"model.megatron": {"moe_aux_loss_coeff": 0.02}},
    "data.apply_chat_template_kwargs={enable_thinking:False}": {
        "data.chat_template_kwargs": {"enable_thinking": False}
    },
    f"{M}.override_transformer_config.moe_aux_loss_coeff=0.01": {"model.megatron": {"moe_aux_loss_coeff": 0.01}},
    f"{R}.engine_kwargs.sglang.attention_backend=triton": {"rollout.sglang": {"attention_backend": "triton"}},
    f"{A}.optim.override_optimizer_config.optimizer_cpu_offload=True": {"optim.cpu_offload": True},
    "trainer.logger=console": {"metrics.wandb": False},
    "trainer.total_training_steps=null trainer.total_epochs=3": {"loop.num_epoch": 3},
    "reward.custom_reward_function.path=mine.py": {"reward.name": "math"},
}


@pytest.mark.parametrize(("line", "expected"), EQUAL_VALUES.items(), ids=list(EQUAL_VALUES))
def test_values_mean_the_same(line: str, expected: dict[str, Any]) -> None:
    job = translated(line)
    assert refusals(job.rows) == ""
    assert {key: value(job, key) for key in expected} == expected


COMPOSED = [
    line
    for line in EQUAL_VALUES
    if any(word in line for word in ("rollout_rs=seq_sum", "separate_async", "gspo", "gae", "WSD"))
]


@pytest.mark.parametrize("line", COMPOSED)
def test_mapped_values_compose(line: str) -> None:
    assert refusals(mapped(line).rows) == ""


MAPPED_VALUES = {
    "algorithm.adv_estimator=remax": "algorithm.adv_estimator",
    f"{A}.policy_loss.loss_mode=clip_cov": f"{A}.policy_loss.loss_mode",
    f"algorithm.adv_estimator=gae {A}.policy_loss.loss_mode=gspo": f"{A}.policy_loss.loss_mode",
    f"{A}.loss_agg_mode=token-sum": f"{A}.loss_agg_mode",
    f"{A}.loss_agg_mode=seq-mean-token-sum": f"{A}.loss_agg_mode",
    f"{A}.loss_agg_mode=seq-mean-token-sum-norm {A}.loss_scale_factor=100": f"{A}.loss_scale_factor",
    f"{A}.policy_loss.loss_mode=gspo {A}.loss_agg_mode=token-mean {A}.entropy_coeff=0.1": f"{A}.loss_agg_mode",
    f"{A}.use_kl_loss=True {A}.kl_loss_type=k3+": f"{A}.kl_loss_type",
    f"{A}.use_kl_loss=True {A}.kl_loss_type=abs": f"{A}.kl_loss_type",
    "algorithm.use_kl_in_reward=True": "algorithm.use_kl_in_reward",
    "algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive": "algorithm.kl_ctrl.type",
    f"{C}.rollout_is=sequence": f"{C}.rollout_is",
    f"{C}.rollout_is=token {C}.rollout_is_batch_normalize=True": f"{C}.rollout_is_batch_normalize",
    f"{C}.rollout_rs='seq_sum_k1,token_k2' {C}.rollout_rs_threshold='2,3'": f"{C}.rollout_rs",
    f"{C}.rollout_rs=seq_mean_k3 {C}.rollout_rs_threshold=0.01": f"{C}.rollout_rs",
    f"{C}.bypass_mode=True {C}.loss_type=reinforce": f"{C}.loss_type",
    f"{C}.bypass_mode=True {C}.rollout_rs=seq_sum_k1": f"{C}.rollout_rs",
    f"{A}.ppo_epochs=2": f"{A}.ppo_epochs",
    f"{A}.optim.optimizer=muon": f"{A}.optim.optimizer",
    f"{A}.optim.lr_decay_style=inverse_square_root": f"{A}.optim.lr_decay_style",
    "actor_rollout_ref.model.lora_rank=32": "actor_rollout_ref.model.lora_rank",
    "data.train_files=[a.parquet,b.parquet]": "data.train_files",
    "data.truncation=left": "data.truncation",
    "data.image_key=images": "data.image_key",
    "data.train_max_samples=100": "data.train_max_samples",
    "reward.reward_model.enable=True": "reward.reward_model.enable",
    f"{R}.multi_turn.enable=True": f"{R}.multi_turn.enable",
    f"{R}.agent.default_agent_loop=tool_agent": f"{R}.agent.default_agent_loop",
    f"{R}.quantization=fp8": f"{R}.quantization",
    f"{M}.router_replay.mode=R3": f"{M}.router_replay.mode",
    "trainer.v1.trainer_mode=colocate_async": "trainer.v1.trainer_mode",
    "trainer.device=npu": "trainer.device",
    "distillation.enabled=True": "distillation.enabled",
    "algorithm.adv_estimator=gae critic.optim.weight_decay=0.5": "critic.optim.weight_decay",
    "algorithm.adv_estimator=gae critic.ppo_mini_batch_size=64": "critic.ppo_mini_batch_size",
    **{
        f"algorithm.adv_estimator=gae {A}.optim.{text}": f"critic.optim.{key}"
        for text, key in (
            ("weight_decay=0.1", "weight_decay"),
            ("clip_grad=0.2", "clip_grad"),
            ("betas=[0.9,0.95]", "betas"),
            ("lr_scheduler_type=cosine", "lr_decay_style"),
            ("lr_decay_style=cosine critic.optim.lr_decay_style=cosine critic.optim.min_lr=1e-9", "min_lr"),
            ("lr_warmup_steps_ratio=0.1 critic.optim.lr_warmup_steps_ratio=0.1", "lr_warmup_steps_ratio"),
        )
    },
    **{f"{FILTER} {METRIC}={name} {OVERLONG}": METRIC for name in ("reward", "seq_reward", "seq_final_reward")},
    f"{FILTER} {METRIC}=length": METRIC,
    "reward_model.my_own_key=1": "reward_model.my_own_key",
    "reward_model.reward_loop_class_name=Mine": "reward_model.reward_loop_class_name",
    "data.train_files=null": "data.train_files",
    "trainer.resume_mode=no": "trainer.resume_mode",
    f"{A}.my_own_key=3": f"{A}.my_own_key",
}


@pytest.mark.parametrize(("line", "key"), MAPPED_VALUES.items(), ids=list(MAPPED_VALUES))
def test_values_without_equivalent_are_refused_unless_dropped(line: str, key: str) -> None:
    rewards = line.startswith("reward")
    answers = () if rewards else (REWARD,)
    problem = refusals(translated(line, user_overrides=answers).rows)
    assert f"  {key} " in problem and f"--drop={key}" in problem
    names = problem.splitlines()[-1].split("--drop=")[1:]
    if key != "data.train_files" and not rewards:
        assert refusals(translated(line, user_overrides=answers, drop=[name.strip() for name in names]).rows) == ""


def test_an_error_about_a_dropped_key_names_the_default_of_verl() -> None:
    key = f"{R}.tensor_model_parallel_size"
    with refusal([f"{key}=2 (verl's default, because of --drop)", "3 GPUs", f"remove --drop and add {key}=VALUE"]):
        translated(f"trainer.n_gpus_per_node=3 {key}=6", drop=[key])


def test_a_default_that_the_user_replaces_is_not_reported() -> None:
    job = translated("", user_overrides=[REWARD, "algo.eps_clip_c=5", "rollout.num_engines=2"])
    keys = [key for row in job.rows if row.verdict == "default" for key in row.keys]
    assert "rollout.tp" in keys and not {"algo.eps_clip_c", "rollout.num_engines"} & {*keys}


VAL_FILES = {
    "x/math.parquet,x/math_2.parquet,y/math.parquet": ["math", "math_2", "math_3"],
    "x/math.parquet,y/math.parquet,x/math_1.parquet,z/math.parquet": ["math", "math_1", "math_1_2", "math_3"],
}


@pytest.mark.parametrize(("files", "names"), VAL_FILES.items(), ids=list(VAL_FILES))
def test_each_file_of_rows_becomes_a_dataset(files: str, names: list[str]) -> None:
    job = translated(f"data.val_files=[{files}] trainer.test_freq=5")
    assert value(job, "evaluation.datasets") == dict(zip(names, files.split(","), strict=True))


@pytest.mark.parametrize("written", ["grad_clip", "optim.clip_grad"])
@pytest.mark.parametrize("dropped", ["grad_clip", "optim.grad_clip", "optim.clip_grad"])
def test_a_setting_is_dropped_by_any_name_of_its_key(written: str, dropped: str) -> None:
    job = translated(f"{A}.{written}=3.0", drop=[f"{A}.{dropped}"])
    assert [(row.verdict, row.note) for row in job.rows if row.flag == f"{A}.{written}"] == [("dropped", "by --drop")]
    assert "optim.clip_grad" not in job.overrides


def test_the_page_names_the_number_of_refills_that_is_written() -> None:
    key = "algorithm.filter_groups.max_num_gen_batches"
    job = translated(f"{FILTER} {METRIC}=acc {key}=10")
    assert VERL_KEYS[key][1] == (
        f"dropped: verl's loop since 0.9 has no limit, so rollout.max_refills={value(job, 'rollout.max_refills')} is set. Older loops "
        "stop after N batches, the first one included: for these give --with rollout.max_refills=N-1 if N is above 0"
    )
    assert next(row.note for row in job.rows if row.flag == key) == (
        "verl's own loop ignores it; if yours stops after N batches: --with rollout.max_refills=N-1"
    )


ANSWERED_REFUSALS = {
    f"{R}.multi_turn.enable=True": [REWARD, "rollout.generate=examples.calculator:calculate"],
    "data.train_files=[a.parquet,b.parquet]": [REWARD, "data.train=all.parquet"],
}


@pytest.mark.parametrize(("line", "answers"), ANSWERED_REFUSALS.items(), ids=list(ANSWERED_REFUSALS))
def test_a_user_override_answers_a_refusal(line: str, answers: list[str]) -> None:
    assert refusals(translated(line, user_overrides=answers).rows) == ""
    partly_answered = translated(line, user_overrides=answers[:-1] if len(answers) > 1 else ())
    assert f"--with {answers[-1].partition('=')[0]}=" in refusals(partly_answered.rows)


ERRORS = {
    f"{A}.ppo_mini_batch_size=48": ["ppo_mini_batch_size", "does not divide", "64"],
    f"{R}.n=1": ["rollout.n_samples_per_prompt=1", f"{R}.n=1", "run.sh:1"],
    f"{R}.top_p=0.9": ["rollout.top_p", f"{R}.top_p=0.9"],
    f"{R}.tensor_model_parallel_size=3": ["tensor_model_parallel_size=3", "8 GPUs"],
    "trainer.n_gpus_per_node=3": [
        f"{R}.tensor_model_parallel_size=2 (verl's default)",
        "3 GPUs",
        f"add {R}.tensor_model_parallel_size=VALUE",
    ],
    "data.train_batch_size=many": ["data.train_batch_size=many", "not a number", "run.sh:1"],
    "data.train_batch_size": ["run.sh:1", "key=value was expected"],
    "data.train_files=a,b": ["run.sh:1", "sets no value"],
    f"{R}.tensor_model_parallel_size=0": ["tensor_model_parallel_size=0", "must be 1 or more", "run.sh:1"],
    f"{A}.ulysses_sequence_parallel_size=0": ["ulysses_sequence_parallel_size=0", "must be 1 or more"],
    f"{A}.optim.betas=[0.9]": ["optim.betas=[0.9]", "not a pair of numbers"],
    f"{A}.optim.betas=0.9": ["optim.betas=0.9", "not a pair of numbers"],
    f"{A}.optim.betas=[a,b]": ["optim.betas=[a,b]", "not a pair of numbers"],
    f"{C}.rollout_rs=seq_sum_k1 {C}.rollout_rs_threshold=inf": ["rollout_rs_threshold=inf", "finite"],
    f"{R}.val_kwargs.n=1.5 data.val_files=v.parquet": ["val_kwargs.n=1.5", "not a whole number"],
    "data.shuffle=maybe": ["data.shuffle=maybe", "neither true nor false"],
    "actor_rollout_ref.model.path=null": ["actor_rollout_ref.model.path=null", "is not text"],
    "data.apply_chat_template_kwargs={a:nan}": [
        "apply_chat_template_kwargs.a=nan",
        "contains a value that JSON cannot represent",
    ],
    "data.prompt_key=null": ["data.prompt_key=null", "is not text"],
    f"{C}.rollout_is=token {C}.rollout_is_threshold=a_b": ["rollout_is_threshold=a_b", "0.5_2.0"],
}


@pytest.mark.parametrize(("line", "words"), ERRORS.items(), ids=list(ERRORS))
def test_invalid_values_end_in_one_message(line: str, words: list[str]) -> None:
    with refusal(words):
        mapped(line)
