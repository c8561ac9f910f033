"""Defaults of verl for keys that a launch script does not set, with our corresponding keys.

Source of the values: ``verl/trainer/config`` of verl 0.10.0.dev (``ppo_trainer.yaml`` and the files that it includes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON, OPTIM = f"{ACTOR}.megatron", f"{ACTOR}.optim"
CORRECTION = "algorithm.rollout_correction"
CRITIC = "critic.optim"
OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg"
SCHEDULE: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "min_lr_ratio": 0.0,
    "lr_decay_style": "constant",
    "lr_decay_steps": None,
    "min_lr": 0.0,
    "lr_wsd_decay_style": "exponential",
    "lr_wsd_decay_steps": None,
}
"""Keys of the actor's and of the critic's schedule."""


@dataclass(frozen=True, slots=True)
class VerlDefault:
    """Key of verl whose default differs from that of our corresponding key."""

    key: str
    value: Any
    our_key: str
    our_value: Any  # our default
    note: str = ""


DIFFERENT: tuple[VerlDefault, ...] = (
    VerlDefault("algorithm.adv_estimator", "gae", "algo", "grpo", "gae becomes algo=ppo"),
    VerlDefault("data.train_batch_size", 1024, "rollout.batch_size", 32, "prompts"),
    VerlDefault(
        f"{ACTOR}.ppo_mini_batch_size", 256, "loop.steps_per_rollout", 1, "train_batch_size / ppo_mini_batch_size"
    ),
    VerlDefault(f"{ROLLOUT}.n", 1, "rollout.n_samples_per_prompt", 8),
    VerlDefault("data.max_response_length", 512, "rollout.max_response_len", 1024),
    VerlDefault("data.max_prompt_length", 512, "data.max_prompt_len", None, "null: the context length is the limit"),
    VerlDefault(
        "reward_model.ground_truth (column)",
        "",
        "data.label_key",
        "label",
        "verl has no key: its label is in this column",
    ),
    VerlDefault(
        "extra_info (column)", "", "data.metadata_key", "metadata", "verl has no key: its metadata are in this column"
    ),
    VerlDefault(
        f"{ACTOR}.clip_ratio_high",
        0.2,
        "algo.eps_clip_high",
        None,
        "null: eps_clip; the default is 0.28 for dapo, 4e-4 for gspo, 4.0 for cispo",
    ),
    VerlDefault(
        f"{ACTOR}.clip_ratio_c", 3.0, "algo.eps_clip_c", None, "null: off; verl's gspo and cispo do not read the key"
    ),
    VerlDefault(f"{ACTOR}.kl_loss_coef", 0.001, "algo.kl_loss_coef", 0.0, "read only with use_kl_loss=True"),
    VerlDefault("algorithm.kl_ctrl.kl_coef", 0.001, "algo.kl_coef", 0.0, "read only with use_kl_in_reward=True"),
    VerlDefault(
        f"{OPTIM}.weight_decay", 0.01, "optim.weight_decay", 0.0, "FSDP also decays norms and biases; not here"
    ),
    VerlDefault(f"{OPTIM}.betas", [0.9, 0.999], "optim.beta2", 0.98, "optim.beta1 is 0.9 in both"),
    VerlDefault("critic.optim.lr", 1e-5, "critic.lr", None, "null: optim.lr"),
    VerlDefault("critic.cliprange_value", 0.5, "critic.value_clip", 0.2),
    VerlDefault(
        f"{MODEL}.enable_gradient_checkpointing",
        True,
        "model.recompute",
        "none",
        "read only with FSDP; affects memory and speed",
    ),
    VerlDefault(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        16384,
        "parallel.max_tokens_per_rank",
        8192,
        "read only with use_dynamic_bsz=True; affects memory and speed",
    ),
    VerlDefault(f"{ROLLOUT}.tensor_model_parallel_size", 2, "rollout.tp", 1),
    VerlDefault(
        f"{ROLLOUT}.max_num_seqs", 256, "rollout.max_running_requests", None, "affects only speed; not written"
    ),
    VerlDefault("trainer.total_epochs", 30, "loop.num_epoch", None, "read only without total_training_steps"),
    VerlDefault("trainer.n_gpus_per_node", 8, "placement.actor_num_gpus_per_node", None, "null: tp * pp * cp"),
    VerlDefault("trainer.logger", ["console", "wandb"], "metrics.wandb", False, "true if the list has wandb"),
    VerlDefault("trainer.project_name", "verl_examples", "metrics.wandb_project", "slime_like", "read only with wandb"),
)
"""Keys in the order of verl's groups."""

SAME: dict[str, Any] = {
    "data.val_files": None,
    "data.reward_fn_key": "data_source",
    "data.shuffle": True,
    "data.seed": None,
    "data.prompt_key": "prompt",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.train_max_samples": -1,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.metric": None,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    f"{CORRECTION}.rollout_is": None,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    f"{CORRECTION}.rollout_is_batch_normalize": False,
    f"{CORRECTION}.rollout_rs": None,
    f"{CORRECTION}.rollout_rs_threshold": None,
    f"{CORRECTION}.bypass_mode": False,
    f"{CORRECTION}.loss_type": "ppo_clip",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.loss_scale_factor": None,
    f"{ACTOR}.entropy_coeff": 0,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": None,
    f"{ACTOR}.ulysses_sequence_parallel_size": 1,
    f"{OPTIM}.lr": 1e-6,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.clip_grad": 1.0,
    **{f"{OPTIM}.{name}": value for name, value in SCHEDULE.items()},
    f"{MEGATRON}.tensor_model_parallel_size": 1,
    f"{MEGATRON}.pipeline_model_parallel_size": 1,
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": None,
    f"{MEGATRON}.context_parallel_size": 1,
    f"{MEGATRON}.expert_model_parallel_size": 1,
    f"{MEGATRON}.expert_tensor_parallel_size": None,
    f"{MEGATRON}.sequence_parallel": True,
    f"{MEGATRON}.use_distributed_optimizer": True,
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1.0,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.max_model_len": None,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.nnodes": 0,
    f"{ROLLOUT}.n_gpus_per_node": None,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.clip_grad": 1.0,
    **{f"{CRITIC}.{name}": value for name, value in SCHEDULE.items()},
    "critic.model.path": None,
    "reward.num_workers": None,
    "reward.reward_manager.name": "naive",
    "reward.custom_reward_function.path": None,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.critic_warmup": 0,
    "trainer.resume_mode": "auto",
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.separate_async.num_warmup_batches": 1,
    "trainer.v1.separate_async.parameter_sync_step": 4,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
}
"""Other defaults of verl that the translation reads."""

VALUES: dict[str, Any] = {item.key: item.value for item in DIFFERENT} | SAME
