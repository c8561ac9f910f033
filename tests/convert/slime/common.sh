# Settings shared by the launch scripts in this folder: flags without which slime trains with dropout, and an optimizer.
COMMON_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --attention-softmax-in-fp32
    --accumulate-allreduce-grads-in-fp32
    --attention-backend flash
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
)
RL_ARGS=(
    --prompt-data ${DATA:-/data}/train.jsonl
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 100
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 4096
    --global-batch-size 64
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)
