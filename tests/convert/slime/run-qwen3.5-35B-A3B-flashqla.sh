#!/bin/bash
# Qwen3.5-35B-A3B with FlashQLA on dapo-math-17k: tp 2, cp 4, ep 8, 8192 response tokens, one node of 8 GPUs.
# Written like slime's launch scripts (https://github.com/THUDM/slime/tree/main/scripts). The backend is that of
# https://github.com/THUDM/slime/pull/1947 (`--qwen-gdn-backend flashqla`), which has no script. Layout, lengths, data and
# reward come from its description of the run, all other flags from slime's scripts for models of this size.
set -ex
pkill -9 sglang || true
ray stop --force
export PYTHONBUFFERED=1

if [ -z "${MODEL_ROOT}" ]; then
    echo "MODEL_ROOT is the folder of checkpoints"
    exit 1
fi
LINKS=$(nvidia-smi topo -m | grep -c NV)
[ "${LINKS}" -gt 0 ] && NVLS=1 || NVLS=0

HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/qwen3.5-35B-A3B.sh"

NAME=Qwen3.5-35B-A3B
DATA=${DATA:-${MODEL_ROOT}/data}
GPUS=${GPUS:-8}
TP=2 CP=4
EP=$((TP * CP))

CKPT_ARGS=(
    --hf-checkpoint "${MODEL_ROOT}/${NAME}"
    --ref-load "${MODEL_ROOT}/${NAME}_torch_dist"
    --load "${MODEL_ROOT}/${NAME}_slime/"
    --save "${MODEL_ROOT}/${NAME}_slime/"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "${DATA}/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1.0
    --global-batch-size 256
    --balance-data
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "${DATA}/aime-2024/aime-2024.jsonl@[0:30]"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 0.7
)

PERF_ARGS=(
    --tensor-model-parallel-size ${TP}
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size ${CP}
    --expert-model-parallel-size ${EP}
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    # --micro-batch-size 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --qwen-gdn-backend flashqla
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)

WANDB_ARGS=(
    # --use-wandb
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
    --sglang-ep-size 8
    --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 64)
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --use-fault-tolerance
)
MISC_ARGS+=(--moe-token-dispatcher-type flex)

ray start --head --num-gpus ${GPUS} --disable-usage-stats

RUNTIME_ENV_JSON=$(cat <<JSON
{"env_vars": {"NCCL_NVLS_ENABLE": "${NVLS}", "NOTE": "a ' quote and a ) parenthesis"}}
JSON
)

ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json="${RUNTIME_ENV_JSON}" \
    -- python3 train.py \
    --actor-num-nodes 1 \
    --actor-num-gpus-per-node ${GPUS} \
    --colocate \
    ${MODEL_ARGS[@]} \
    ${CKPT_ARGS[@]} \
    ${ROLLOUT_ARGS[@]} \
    "${EVAL_ARGS[@]}" \
    ${PERF_ARGS[@]} \
    ${GRPO_ARGS[@]} \
    ${OPTIMIZER_ARGS[@]} \
    "${WANDB_ARGS[@]}" \
    ${SGLANG_ARGS[@]} \
    ${MISC_ARGS[@]} 2>&1 | tee run.log
