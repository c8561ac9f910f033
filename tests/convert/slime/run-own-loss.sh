#!/bin/bash
# Losses and advantages of its own, a reward that no table has, and no word about dropout.
source "$(dirname "$0")/common.sh"
python3 train.py --colocate --hf-checkpoint /m/Model-4B --rm-type my-own --loss-type custom_loss \
    --custom-loss-function-path my_losses.clipped --custom-advantage-function-path my_losses.advantages \
    --update-weights-interval 4 --my-own-flag 3 ${RL_ARGS[@]} ${COMMON_ARGS[@]:4} --lr 1e-6
