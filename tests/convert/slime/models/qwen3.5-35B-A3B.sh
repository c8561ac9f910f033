# Qwen3.5-35B-A3B as Megatron's flags: every fourth layer attention, the others Gated DeltaNet, experts in all 40.
LAYERS=40
EXPERT_LAYERS=()
for ((layer = 0; layer < LAYERS; layer++)); do
    EXPERT_LAYERS+=(1)
done
printf -v MOE_FREQ "[%s]" "$(IFS=,; echo "${EXPERT_LAYERS[*]}")"

EXPERT_HIDDEN=512
SHARED_EXPERTS=1

MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers ${LAYERS}
    --hidden-size 2048
    --ffn-hidden-size ${EXPERT_HIDDEN}
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 2
    --kv-channels 256
    --qk-layernorm
    --use-gated-attention
    --attention-output-gate
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base 10000000
    --rotary-percent 0.25
    --vocab-size 248320
    --untie-embeddings-and-output-weights
    # experts
    --num-experts 256
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-ffn-hidden-size ${EXPERT_HIDDEN}
    --moe-shared-expert-intermediate-size $((EXPERT_HIDDEN * SHARED_EXPERTS))
    --moe-shared-expert-gate
    --moe-layer-freq "${MOE_FREQ}"
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --moe-permute-fusion
    --moe-aux-loss-coeff 0
)
