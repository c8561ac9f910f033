#!/usr/bin/env bash
# GRPO on two devices' worth of branches, as launch scripts of verl are written.
set -xeuo pipefail

DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-$MODELS/small-4b}
NNODES=${NNODES:-1}
LR=${LR:-2e-6}
max_prompt=1024
max_answer=$((4 * 1024))
budget=$(((max_prompt + max_answer) * 3))

case "${DEVICE}" in
    gpu)
        prompts=${PROMPTS:-128}
        util=0.5
        ;;
    npu | other)
        prompts=64
        export HCCL_CONNECT_TIMEOUT=1500
        ;;
    *)
        echo "no such device" >&2
        exit 1
        ;;
esac

DATA=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    data.train_files="['$MODELS/data/train.parquet']"
    data.val_files="['$MODELS/data/aime-24/test.parquet','$MODELS/data/gsm8k/test.parquet']"
    data.train_batch_size=${prompts}
    data.max_prompt_length=$max_prompt
    data.max_response_length=$max_answer
    data.filter_overlong_prompts=True
    data.truncation='error'
    +data.apply_chat_template_kwargs.enable_thinking=False
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.actor.optim.lr=$LR
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    ++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=sglang
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.gpu_memory_utilization=${util:-0.4}
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6
    actor_rollout_ref.rollout.val_kwargs.n=4
)
REWARD=(
    reward.reward_manager.name=dapo
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward.reward_kwargs.overlong_buffer_cfg.len=512
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
    +reward.reward_kwargs.max_resp_len=$max_answer
)
TRAINER=(
    trainer.logger='["console","tensorboard"]'
    trainer.project_name=small
    trainer.experiment_name=small_math
    trainer.n_gpus_per_node=8
    trainer.nnodes=$NNODES
    trainer.save_freq=20
    trainer.test_freq=5
    trainer.total_epochs=2
    trainer.total_training_steps=${STEPS:-120}
)
EXTRA=(model_engine=megatron)
if [ "${DEVICE}" = npu ]; then
    EXTRA+=(actor_rollout_ref.actor.use_torch_compile=False)
fi
LAUNCH=(python3)
RAY=(ray_kwargs.ray_init.num_cpus=null)
if [ "${USE_UV:-1}" != 0 ] && { [ "${DEVICE:-gpu}" = gpu ] || [ "${DEVICE}" = rocm ]; }; then
    LAUNCH=(uv run --extra sglang python3)
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv run --extra sglang")
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REWARD[@]}" \
    "${TRAINER[@]}" \
    "${EXTRA[@]}" \
    "${RAY[@]}" \
    "$@"
