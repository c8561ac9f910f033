#!/bin/bash
# Engines of their own GPUs, watched and restarted; the trainer one rollout behind.
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/models/dense-4B.sh"
NAME=$(basename /m/Model-4B/ .unused)
python3 train_async.py --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 \
    --hf-checkpoint "/m/${NAME}" --load "/ckpt/${NAME}/" --save "/ckpt/${NAME}" --save-interval 10 --rm-type math \
    --use-fault-tolerance --rollout-health-check-interval 20 --rollout-health-check-timeout 10 \
    --rollout-health-check-first-wait 300 --update-weight-mode delta --update-weight-transport disk \
    ${MODEL_ARGS[@]} ${COMMON_ARGS[@]} ${RL_ARGS[@]}
