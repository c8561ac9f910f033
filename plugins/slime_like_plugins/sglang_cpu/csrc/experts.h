/* SwiGLU experts of the few rows of a decode step, included once per element type: T float or bf16, NAME(f) its f_f32 or f_bf16.
 * Axes: n rows, s experts of a row, e experts in this memory, h hidden, f intermediate.
 *
 * A library packs the weights of each small product. Here a block of weights is loaded once for up to four rows. An output's
 * sum runs over fixed lanes, independent of other rows: bits do not depend on the batch. */

#define CHUNK 64 /* pairs of an expert that are computed together */

/* Dot products of `rows` (a constant) rows x [k] with LANES / rows consecutive rows of weight [., k], of which `left` exist; the
 * products of the others are undefined. Lane r * (LANES / rows) + o of the result: row r, output o. */
INLINE vf NAME(dots)(const float *const x[], const T *weight, int64_t k, int64_t left, const int rows) {
    const int64_t num_full = k / LANES * LANES, tail = k - num_full;
    const int outputs = LANES / rows;
    vf sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = (vf){0};
    for (int64_t c = 0; c < num_full; c += LANES)
#pragma GCC unroll 16
        for (int o = 0; o < outputs; o++) {
            const vf w = NAME(load)(weight + (o < left ? o : 0) * k + c);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sums[r * outputs + o] = fma_of(load_f32(x[r] + c), w, sums[r * outputs + o]);
        }
    if (tail)
        for (int o = 0; o < outputs; o++) {
            const vf w = NAME(load_part)(weight + (o < left ? o : 0) * k + num_full, tail);
            for (int r = 0; r < rows; r++)
                sums[r * outputs + o] = fma_of(load_part_f32(x[r] + num_full, tail), w, sums[r * outputs + o]);
        }
    return row_sums(sums);
}

/* Store the lanes of a row's outputs to out[r], of which `left` exist. */
INLINE void NAME(store_outputs)(vf y, float *const out[], int64_t left, const int rows) {
    const int outputs = LANES / rows;
    float lanes[LANES];
    store_f32(lanes, y);
    for (int r = 0; r < rows; r++)
        memcpy(out[r], lanes + r * outputs, (left < outputs ? left : outputs) * sizeof(float));
}

/* Up to LANES outputs from output j on, of `rows` rows: silu(gate) * up of w13 [2 f, h], or the products with w2 [h, f]. */
INLINE void NAME(gated)(const float *const x[], const T *w13, float *const active[], int64_t h, int64_t f, int64_t j,
                        const int rows) {
    for (int64_t o = j; o < f && o < j + LANES; o += LANES / rows) {
        const vf gate = NAME(dots)(x, w13 + o * h, h, f - o, rows), up = NAME(dots)(x, w13 + (f + o) * h, h, f - o, rows);
        float *to[4];
        for (int r = 0; r < rows; r++) to[r] = active[r] + o;
        NAME(store_outputs)(gate / (vexp(-gate) + 1.0f) * up, to, f - o, rows);
    }
}
INLINE void NAME(down)(const float *const active[], const T *w2, float *const out[], int64_t h, int64_t f, int64_t j,
                       const int rows) {
    for (int64_t o = j; o < h && o < j + LANES; o += LANES / rows) {
        float *to[4];
        for (int r = 0; r < rows; r++) to[r] = out[r] + o;
        NAME(store_outputs)(NAME(dots)(active, w2 + o * f, f, h - o, rows), to, h - o, rows);
    }
}

/* One expert: write the outputs [h] of its `count` <= CHUNK pairs p, each of row p / s of x [n, h], to out + p * h.
 * active [count, f]. */
INLINE void NAME(expert)(const float *x, const int32_t *pairs, int64_t count, const T *w13, const T *w2, float *out,
                         float *active, int64_t s, int64_t h, int64_t f) {
    const float *rows[CHUNK], *inner[CHUNK];
    float *actives[CHUNK], *outs[CHUNK];
    for (int64_t i = 0; i < count; i++) {
        rows[i] = x + pairs[i] / s * h;
        inner[i] = actives[i] = active + i * f;
        outs[i] = out + pairs[i] * h;
    }
#define ROWS_OF(CALL) \
    int64_t i = 0; \
    for (; i + 4 <= count; i += 4) CALL(4); \
    for (; i + 2 <= count; i += 2) CALL(2); \
    for (; i < count; i++) CALL(1);
#define GATED(R) NAME(gated)(rows + i, w13, actives + i, h, f, j, R)
#define DOWN(R) NAME(down)(inner + i, w2, outs + i, h, f, j, R)
    for (int64_t j = 0; j < f; j += LANES) { ROWS_OF(GATED) }
    for (int64_t j = 0; j < h; j += LANES) { ROWS_OF(DOWN) }
#undef ROWS_OF
#undef GATED
#undef DOWN
}

/* sums [n, h] over s, in order, of weights [n, s] times the outputs of the experts ids [n, s] for x [n, h]; an id that
 * is not in [0, e) has no expert. w13 [e, 2 f, h]: gate, then up; w2 [e, h, f]. Workspaces: out [n s, h],
 * active [threads, min(n s, CHUNK), f], pairs [n s], ends [e + 1]. */
void NAME(expert_sums)(const float *x, const int32_t *ids, const float *weights, const T *w13, const T *w2, float *sums,
                       float *out, float *active, int32_t *pairs, int64_t *ends, int64_t n, int64_t s, int64_t e, int64_t h,
                       int64_t f) {
    const int64_t size = (n * s < CHUNK ? n * s : CHUNK) * f;
    for (int64_t i = 0; i <= e; i++) ends[i] = 0;
    for (int64_t p = 0; p < n * s; p++)
        if (0 <= ids[p] && ids[p] < e) ends[ids[p] + 1]++;
    for (int64_t i = 0; i < e; i++) ends[i + 1] += ends[i];
    for (int64_t p = 0; p < n * s; p++) /* afterwards ends[i] is the end of expert i */
        if (0 <= ids[p] && ids[p] < e) pairs[ends[ids[p]]++] = (int32_t)p;
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) if (!omp_in_parallel() && ends[e] * h * f > 65536)
#endif
    for (int64_t i = 0; i < e; i++)
        for (int64_t p = i ? ends[i - 1] : 0; p < ends[i]; p += CHUNK)
            NAME(expert)(x, pairs + p, ends[i] - p < CHUNK ? ends[i] - p : CHUNK, w13 + i * 2 * f * h, w2 + i * h * f, out,
                         active + THREAD * size, s, h, f);
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < h; c++) {
            float sum = 0;
            for (int64_t p = i * s; p < (i + 1) * s; p++)
                if (0 <= ids[p] && ids[p] < e) sum += weights[p] * out[p * h + c];
            sums[i * h + c] = sum;
        }
}
#undef CHUNK
