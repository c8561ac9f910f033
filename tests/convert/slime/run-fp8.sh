#!/bin/bash
# Rollouts from float8 weights, training in float8 as well.
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/models/dense-4B.sh"
python3 train.py --colocate --hf-checkpoint /m/Model-4B-FP8 --ref-load /m/Model-4B_torch_dist --rm-type math \
    --transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise \
    ${MODEL_ARGS[@]} ${COMMON_ARGS[@]} ${RL_ARGS[@]}
