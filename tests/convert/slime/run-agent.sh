#!/bin/bash
# An agent with a search tool: generate function and reward of its own, which no machine but its author's has.
source "$(dirname "$0")/common.sh"
source "$(dirname "$0")/models/of-a-model-that-is-not-here.sh"

AGENT_ARGS=(
    --custom-generate-function-path my_search_agent.generate.generate
    --custom-rm-path my_search_agent.reward.score
    --rm-type math
    --rollout-max-context-len 16384
    --eval-interval 10
    --eval-prompt-data /data/heldout.jsonl
    --eval-max-response-len 16384
    --over-sampling-batch-size 32
)
RUNTIME='{"env_vars": {"PYTHONPATH": "/opt/agents:/opt/Megatron-LM", "SEARCH_URL": "http://127.0.0.1:8000"}}'
python3 train.py --colocate --hf-checkpoint /m/Model-4B ${MODEL_ARGS[@]} ${COMMON_ARGS[@]} ${RL_ARGS[@]} ${AGENT_ARGS[@]}
