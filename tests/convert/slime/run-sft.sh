#!/bin/bash
# Supervised fine-tuning on conversations: no engine runs, and epochs are counted from the data.
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${HERE}/common.sh"
source "/somewhere/else/slime/models/dense-4B.sh"

SFT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --loss-type sft_loss
    --disable-compute-advantages-and-returns
    --debug-train-only
    --calculate-per-token-loss
    --loss-mask-type qwen3_5
    --prompt-data /data/conversations.parquet
    --input-key messages
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 64
    --lr-warmup-fraction 0.1
)
ray job submit -- python3 train_async.py --hf-checkpoint /m/Model-4B-Base --ref-load /m/Model-4B-Base_torch_dist \
    --actor-num-gpus-per-node 8 ${MODEL_ARGS[@]} ${COMMON_ARGS[@]} ${SFT_ARGS[@]} --lr-decay-style cosine --min-lr 1e-7
