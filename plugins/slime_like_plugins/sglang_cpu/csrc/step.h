/* One decode step of a model, included once per element type after typed.h and product.h.
 *
 * Each row is a token of a different request, and no request reads data that another writes in this step. A
 * thread computes all layers for its rows, so the step is one parallel region instead of one per kernel and product. */

typedef struct {
    const T *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *gate_up_bias, *down,
        *down_bias; /* weights of products packed; biases and head norms null if the model has none */
    T *keys, *values;
} NAME(Layer);

typedef struct {
    const T *norm, *head; /* head packed */
    const float *cos_sin;
    const int64_t *positions, *slots, *rows, *lens;
    const int32_t *table;
    T *x, *h, *qkv, *q, *attended, *gate_up, *activated, *delta, *logits;
    float *scores;
    int64_t table_stride, scores_per_thread, hidden, heads, kv_heads, dim, width, vocabulary;
} NAME(Step);

/* Rows lo <= i < hi through all layers; scores: this thread's workspace. */
INLINE void NAME(rows_decode)(const NAME(Layer) *layers, int64_t num_layers, const NAME(Step) s, int64_t lo, int64_t hi,
                              float *scores, float scale, float eps) {
    const int64_t d = s.dim, inner = s.heads * d, all_heads = (s.heads + 2 * s.kv_heads) * d, m = hi - lo;
    T *x = s.x + lo * s.hidden, *h = s.h + lo * s.hidden, *delta = s.delta + lo * s.hidden;
    T *qkv = s.qkv + lo * all_heads, *q = s.q + lo * inner, *attended = s.attended + lo * inner;
    T *gate_up = s.gate_up + lo * 2 * s.width, *activated = s.activated + lo * s.width;
    const T *pending_delta = 0;
    for (const NAME(Layer) *l = layers; l < layers + num_layers; l++) {
        NAME(add_rms_norm)(x, pending_delta, l->attention_norm, h, m, s.hidden, eps);
        NAME(rows_product)(h, l->qkv, l->qkv_bias, qkv, m, s.hidden, all_heads);
        NAME(rope_and_store)(qkv, l->q_norm, l->k_norm, s.cos_sin, s.positions + lo, s.slots + lo, l->keys, l->values, q, m,
                             s.heads, s.kv_heads, d, eps);
        NAME(attention)(q, l->keys, l->values, s.table, s.table_stride, s.rows + lo, s.lens + lo, attended, scores,
                        s.scores_per_thread, m, s.heads, s.kv_heads, d, scale);
        NAME(rows_product)(attended, l->out, l->out_bias, delta, m, inner, s.hidden);
        NAME(add_rms_norm)(x, delta, l->mlp_norm, h, m, s.hidden, eps);
        NAME(rows_product)(h, l->gate_up, l->gate_up_bias, gate_up, m, s.hidden, 2 * s.width);
        NAME(silu_mul)(gate_up, activated, m, s.width);
        NAME(rows_product)(activated, l->down, l->down_bias, delta, m, s.width, s.hidden);
        pending_delta = delta;
    }
    NAME(add_rms_norm)(x, pending_delta, s.norm, h, m, s.hidden, eps);
    NAME(rows_product)(h, s.head, 0, s.logits + lo * s.vocabulary, m, s.hidden, s.vocabulary);
}

/* x [n, hidden] embedded -> h [n, hidden] normed, logits [n, vocabulary]. The other tensors of `step` are workspaces:
 * qkv [n, (heads + 2 kv_heads) dim], q, attended [n, heads dim], gate_up [n, 2 width], activated [n, width],
 * delta [n, hidden]; the rest as in the kernels. */
void NAME(decode)(const NAME(Layer) *layers, int64_t num_layers, const NAME(Step) *step, int64_t n, float scale, float eps) {
    PARALLEL(1) {
        const int64_t lo = n * THREAD / TEAM, hi = n * (THREAD + 1) / TEAM;
        float *scores = step->scores + THREAD * step->scores_per_thread;
        if (lo < hi) NAME(rows_decode)(layers, num_layers, *step, lo, hi, scores, scale, eps);
    }
}
