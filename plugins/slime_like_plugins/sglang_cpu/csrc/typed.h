/* Included once per element type: T float or bf16, NAME(f) its f_f32 or f_bf16.
 * Axes: n rows (one token of one request each), h hidden, d head dimension. */

/* x += delta (if not null), out = RMSNorm(x) * weight; the norm is of the unrounded sum.
 * x, delta, out [n, h], weight [h]. */
void NAME(add_rms_norm)(T *x, const T *delta, const T *weight, T *out, int64_t n, int64_t h, float eps) {
    const int64_t num_full = h / LANES * LANES, tail = h - num_full;
    PARALLEL_ROWS(n * h)
    for (int64_t i = 0; i < n; i++) {
        T *xi = x + i * h, *oi = out + i * h;
        const T *di = delta ? delta + i * h : 0;
        float row[num_full + LANES];
        vf squares = {0};
        for (int64_t j = 0; j < h; j += LANES) {
            const int part = j == num_full;
            vf a = part ? NAME(load_part)(xi + j, tail) : NAME(load)(xi + j);
            if (di) {
                a += part ? NAME(load_part)(di + j, tail) : NAME(load)(di + j);
                if (part) NAME(store_part)(xi + j, a, tail);
                else NAME(store)(xi + j, a);
            }
            squares += a * a;
            store_f32(row + j, a);
        }
        vf scale = broadcast(1.0f / sqrtf(lane_sum(squares) / (float)h + eps));
        for (int64_t j = 0; j < num_full; j += LANES)
            NAME(store)(oi + j, load_f32(row + j) * scale * NAME(load)(weight + j));
        if (tail) {
            vf w = NAME(load_part)(weight + num_full, tail);
            NAME(store_part)(oi + num_full, load_f32(row + num_full) * scale * w, tail);
        }
    }
}

/* gate_up [n, 2 h] -> silu(gate) * up [n, h] */
void NAME(silu_mul)(const T *gate_up, T *out, int64_t n, int64_t h) {
    const int64_t num_full = h / LANES * LANES, tail = h - num_full;
    PARALLEL_ROWS(n * h)
    for (int64_t i = 0; i < n; i++) {
        const T *g = gate_up + i * 2 * h, *u = g + h;
        T *o = out + i * h;
        for (int64_t j = 0; j < num_full; j += LANES) {
            vf a = NAME(load)(g + j);
            NAME(store)(o + j, a / (vexp(-a) + 1.0f) * NAME(load)(u + j));
        }
        if (tail) {
            vf a = NAME(load_part)(g + num_full, tail);
            NAME(store_part)(o + num_full, a / (vexp(-a) + 1.0f) * NAME(load_part)(u + num_full, tail), tail);
        }
    }
}

/* One head: RMSNorm over d (if there is a weight), then rotation of halves. cos_sin [d]: cosines, then sines. */
INLINE void NAME(norm_rotate)(const T *in, const T *weight, const float *cos_sin, T *out, int64_t d, float eps) {
    const int64_t half = d / 2, num_full = d / LANES * LANES, tail = d - num_full;
    float t[num_full + LANES];
    vf squares = {0};
    for (int64_t j = 0; j < d; j += LANES) {
        vf a = j == num_full ? NAME(load_part)(in + j, tail) : NAME(load)(in + j);
        squares += a * a;
        store_f32(t + j, a);
    }
    if (weight) {
        vf scale = broadcast(1.0f / sqrtf(lane_sum(squares) / (float)d + eps));
        for (int64_t j = 0; j < d; j += LANES) {
            vf w = j == num_full ? NAME(load_part)(weight + j, tail) : NAME(load)(weight + j);
            store_f32(t + j, load_f32(t + j) * scale * w);
        }
    }
    for (int64_t j = 0; j < half; j += LANES) {
        const int64_t num_left = half - j;
        const int part = num_left < LANES;
        vf c = part ? load_part_f32(cos_sin + j, num_left) : load_f32(cos_sin + j);
        vf s = part ? load_part_f32(cos_sin + half + j, num_left) : load_f32(cos_sin + half + j);
        vf a = part ? load_part_f32(t + j, num_left) : load_f32(t + j);
        vf b = part ? load_part_f32(t + half + j, num_left) : load_f32(t + half + j);
        if (part) {
            NAME(store_part)(out + j, a * c - b * s, num_left);
            NAME(store_part)(out + half + j, b * c + a * s, num_left);
        } else {
            NAME(store)(out + j, a * c - b * s);
            NAME(store)(out + half + j, b * c + a * s);
        }
    }
}

/* qkv [n, (heads + 2 kv_heads) d] -> queries [n, heads, d]; keys and values go to rows slots[n] of their pools
 * [., kv_heads, d]. q_norm, k_norm: weights [d] or null. cos_sin [., d], read at positions[n]. */
void NAME(rope_and_store)(const T *qkv, const T *q_norm, const T *k_norm, const float *cos_sin, const int64_t *positions,
                          const int64_t *slots, T *keys, T *values, T *queries, int64_t n, int64_t heads,
                          int64_t kv_heads, int64_t d, float eps) {
    PARALLEL_ROWS(n * (heads + kv_heads) * d)
    for (int64_t i = 0; i < n; i++) {
        const T *row = qkv + i * (heads + 2 * kv_heads) * d;
        const float *angles = cos_sin + positions[i] * d;
        for (int64_t h = 0; h < heads; h++)
            NAME(norm_rotate)(row + h * d, q_norm, angles, queries + (i * heads + h) * d, d, eps);
        T *key = keys + slots[i] * kv_heads * d;
        for (int64_t h = 0; h < kv_heads; h++)
            NAME(norm_rotate)(row + (heads + h) * d, k_norm, angles, key + h * d, d, eps);
        memcpy(values + slots[i] * kv_heads * d, row + (heads + kv_heads) * d, kv_heads * d * sizeof(T));
    }
}

/* `group` query heads of one KV head of one request. q, out [group, d]; keys, values: their pools at this KV head, rows
 * `stride` apart; slots [len]; scores [group * (len rounded up to LANES)]. With constant group and d, the
 * loops unroll into registers. If `partial` is not null, the output is stored there unrounded instead of in `out`, and the
 * logarithm of the sum of exp(scores) of each head in `lse` [group]. */
INLINE void NAME(attend)(const T *q, const T *keys, const T *values, int64_t stride, const int32_t *slots, int64_t len,
                         T *out, float *partial, float *lse, float *scores, const int group, const int64_t d, float scale) {
    const int64_t vectors = (d + LANES - 1) / LANES, tail = d % LANES;
    const int64_t padded = (len + LANES - 1) / LANES * LANES;
    vf qs[group * vectors];
    for (int g = 0; g < group; g++)
        for (int64_t c = 0; c < vectors; c++) {
            const T *p = q + g * d + c * LANES;
            qs[g * vectors + c] = (tail && c + 1 == vectors ? NAME(load_part)(p, tail) : NAME(load)(p)) * scale;
        }
    for (int64_t t = 0; t < padded; t += LANES) {
        vf products[group][LANES];
        for (int k = 0; k < LANES; k++) {
            const T *key = keys + (int64_t)slots[t + k < len ? t + k : len - 1] * stride;
            prefetch(keys + (int64_t)slots[t + k + LOOKAHEAD < len ? t + k + LOOKAHEAD : len - 1] * stride, d * sizeof(T));
            for (int g = 0; g < group; g++) products[g][k] = (vf){0};
            for (int64_t c = 0; c < vectors; c++) {
                vf a = tail && c + 1 == vectors ? NAME(load_part)(key + c * LANES, tail) : NAME(load)(key + c * LANES);
                for (int g = 0; g < group; g++) products[g][k] += qs[g * vectors + c] * a;
            }
        }
        for (int g = 0; g < group; g++) store_f32(scores + g * padded + t, row_sums(products[g]));
    }
    vf inverse[group];
    for (int g = 0; g < group; g++) {
        float *s = scores + g * padded;
        for (int64_t t = len; t < padded; t++) s[t] = -INFINITY;
        vf top = broadcast(-INFINITY), sum = {0};
        for (int64_t t = 0; t < padded; t += LANES) top = elementwise_max(top, load_f32(s + t));
        const float max_score = lane_max(top);
        for (int64_t t = 0; t < padded; t += LANES) {
            vf e = vexp(load_f32(s + t) - max_score);
            store_f32(s + t, e);
            sum += e;
        }
        const float total = lane_sum(sum);
        inverse[g] = broadcast(1.0f / total);
        if (partial) lse[g] = max_score + logf(total);
    }
    vf sums[group * vectors];
    for (int64_t j = 0; j < group * vectors; j++) sums[j] = (vf){0};
    for (int64_t t = 0; t < len; t++) {
        const T *value = values + (int64_t)slots[t] * stride;
        prefetch(values + (int64_t)slots[t + LOOKAHEAD < len ? t + LOOKAHEAD : len - 1] * stride, d * sizeof(T));
        for (int64_t c = 0; c < vectors; c++) {
            vf a = tail && c + 1 == vectors ? NAME(load_part)(value + c * LANES, tail) : NAME(load)(value + c * LANES);
            for (int g = 0; g < group; g++) sums[g * vectors + c] += scores[g * padded + t] * a;
        }
    }
    for (int g = 0; g < group; g++)
        for (int64_t c = 0; c < vectors; c++) {
            vf o = sums[g * vectors + c] * inverse[g];
            const int64_t at = g * d + c * LANES;
            const int in_tail = tail && c + 1 == vectors;
            if (partial && in_tail) store_part_f32(partial + at, o, tail);
            else if (partial) store_f32(partial + at, o);
            else if (in_tail) NAME(store_part)(out + at, o, tail);
            else NAME(store)(out + at, o);
        }
}

#define ATTEND(G, D) \
    NAME(attend)(queries + at * d, keys + k * d, values + k * d, kv_heads * d, slots, lens[i], oi, pi, li, scores, G, D, scale)
#define ATTEND_GROUP(D) \
    switch (num_heads) { \
    case 1: ATTEND(1, D); break; \
    case 2: ATTEND(2, D); break; \
    case 3: ATTEND(3, D); break; \
    default: ATTEND(4, D); \
    }

static void NAME(attend_requests)(const T *queries, const T *keys, const T *values, const int32_t *table,
                                  int64_t table_stride, const int64_t *rows, const int64_t *lens, T *out, float *partial,
                                  float *lse, float *workspace, int64_t scores_per_thread, int64_t n, int64_t heads,
                                  int64_t kv_heads, int64_t d, float scale) {
    const int64_t group = heads / kv_heads;
    if (n == 0) return; /* an empty array has no lens[0] */
    PARALLEL_ROWS(n * heads * d * (lens[0] + 1))
    for (int64_t i = 0; i < n; i++) {
        const int32_t *slots = table + rows[i] * table_stride;
        float *scores = workspace + THREAD * scores_per_thread;
        if (partial && lens[i] == 0) {
            memset(partial + i * heads * d, 0, heads * d * sizeof(float));
            for (int64_t h = 0; h < heads; h++) lse[i * heads + h] = -INFINITY;
            continue;
        }
        for (int64_t k = 0; k < kv_heads; k++)
            for (int64_t g = 0; g < group; g += 4) {
                const int64_t num_heads = group - g < 4 ? group - g : 4, at = i * heads + k * group + g;
                T *oi = partial ? 0 : out + at * d;
                float *pi = partial ? partial + at * d : 0, *li = partial ? lse + at : 0;
                if (d == 32) ATTEND_GROUP(32)
                else if (d == 64) ATTEND_GROUP(64)
                else if (d == 128) ATTEND_GROUP(128)
                else ATTEND_GROUP(d)
            }
    }
}

/* Decode attention: one query per request over its KV rows. queries, out [n, heads, d]; keys, values: pools
 * [., kv_heads, d]; slots of request i: the first lens[i] >= 1 entries of row rows[i] of table.
 * workspace [threads, scores_per_thread]; a thread needs 4 * (longest request rounded up to LANES). Up to four query
 * heads are processed together, which fits the registers. */
void NAME(attention)(const T *queries, const T *keys, const T *values, const int32_t *table, int64_t table_stride,
                     const int64_t *rows, const int64_t *lens, T *out, float *workspace, int64_t scores_per_thread,
                     int64_t n, int64_t heads, int64_t kv_heads, int64_t d, float scale) {
    NAME(attend_requests)(queries, keys, values, table, table_stride, rows, lens, out, 0, 0, workspace, scores_per_thread, n,
                          heads, kv_heads, d, scale);
}

/* Decode attention over some of a sequence's KV rows, lens[i] >= 0: the unrounded output [n, heads, d], and for each head the
 * logarithm of the sum of exp(scores) [n, heads], by which outputs over different rows are merged. Without rows: 0 and -inf. */
void NAME(partial_attention)(const T *queries, const T *keys, const T *values, const int32_t *table, int64_t table_stride,
                             const int64_t *rows, const int64_t *lens, float *partial, float *lse, float *workspace,
                             int64_t scores_per_thread, int64_t n, int64_t heads, int64_t kv_heads, int64_t d, float scale) {
    NAME(attend_requests)(queries, keys, values, table, table_stride, rows, lens, 0, partial, lse, workspace,
                          scores_per_thread, n, heads, kv_heads, d, scale);
}
#undef ATTEND
#undef ATTEND_GROUP
