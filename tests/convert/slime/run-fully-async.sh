#!/bin/bash
# Rollouts that never pause for the trainer, and a correction of the importance weights in a function of its own.
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/models/dense-4B.sh"
python3 train_async.py --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --hf-checkpoint /m/Model-4B --rm-type math \
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async \
    --use-tis --custom-tis-function-path my_corrections.weights.clipped \
    ${MODEL_ARGS[@]} ${COMMON_ARGS[@]} ${RL_ARGS[@]}
