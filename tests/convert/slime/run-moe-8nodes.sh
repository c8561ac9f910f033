#!/bin/bash
# A mixture of experts on eight nodes, engines of 16 GPUs with attention in parts, and expert balancing without a loss.
source "$(dirname "$0")/common.sh"
MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 0
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --rollout-num-gpus-per-engine 16
    --sglang-enable-dp-attention
    --sglang-dp-size 4
    --sglang-ep-size 16
    --rm-type deepscaler
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --over-sampling-batch-size 64
)
for WORKER in $(cat hosts); do
    ssh "${WORKER}" ray start --address="${MASTER_ADDR}:6379" &
done
cd /opt/slime && ray job submit -- python3 train.py --colocate --hf-checkpoint /m/Moe-30B --ref-load /m/Moe-30B-tuned_torch_dist \
    --actor-num-nodes 8 ${COMMON_ARGS[@]} ${RL_ARGS[@]} ${MOE_ARGS[@]}
