/* SwiGLU experts of the few rows of a decode step, included once per element type: T float or bf16, NAME(f) its f_f32 or f_bf16.
 * Axes: n rows, s experts of a row, e experts in this memory, h hidden, f intermediate.
 *
 * A library packs the weights of each small product. Here every weight is read once and multiplied by all rows of its expert.
 * An output's sum runs over fixed lanes, independent of other rows: bits do not depend on the batch. */

/* Dot products of x [k] with LANES consecutive rows of weight [., k], of which `left` exist; the others are undefined. */
INLINE vf NAME(outputs)(const float *x, const T *weight, int64_t k, int64_t left) {
    const int64_t num_full = k / LANES * LANES, tail = k - num_full;
    vf sums[LANES];
    for (int j = 0; j < LANES; j++) sums[j] = (vf){0};
    for (int64_t c = 0; c < num_full; c += LANES) {
        const vf a = load_f32(x + c);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sums[j] += a * NAME(load)(weight + (j < left ? j : 0) * k + c);
    }
    if (tail)
        for (int j = 0; j < LANES; j++)
            sums[j] += load_part_f32(x + num_full, tail) * NAME(load_part)(weight + (j < left ? j : 0) * k + num_full, tail);
    return row_sums(sums);
}

/* One expert: the outputs [h] of its `count` pairs, pair p of row p / s of x [n, h], to out + p * h. active [count, f]. */
INLINE void NAME(expert)(const float *x, const int32_t *pairs, int64_t count, const T *w13, const T *w2, float *out,
                         float *active, int64_t s, int64_t h, int64_t f) {
    for (int64_t j = 0; j < f; j += LANES) {
        const int64_t left = f - j;
        for (int64_t i = 0; i < count; i++) {
            const float *row = x + pairs[i] / s * h;
            const vf gate = NAME(outputs)(row, w13 + j * h, h, left), up = NAME(outputs)(row, w13 + (f + j) * h, h, left);
            const vf y = gate / (vexp(-gate) + 1.0f) * up;
            if (left < LANES) store_part_f32(active + i * f + j, y, left);
            else store_f32(active + i * f + j, y);
        }
    }
    for (int64_t j = 0; j < h; j += LANES) {
        const int64_t left = h - j;
        for (int64_t i = 0; i < count; i++) {
            const vf y = NAME(outputs)(active + i * f, w2 + j * f, f, left);
            if (left < LANES) store_part_f32(out + pairs[i] * h + j, y, left);
            else store_f32(out + pairs[i] * h + j, y);
        }
    }
}

/* sums [n, h] of weights [n, s] times the experts ids [n, s] of x [n, h], in the order of s; an id outside of [0, e) has no
 * expert. w13 [e, 2 f, h]: gate, then up; w2 [e, h, f]. Workspaces: out [n s, h], active [threads, n s, f],
 * pairs [n s], ends [e + 1]. */
void NAME(expert_sums)(const float *x, const int32_t *ids, const float *weights, const T *w13, const T *w2, float *sums,
                       float *out, float *active, int32_t *pairs, int64_t *ends, int64_t n, int64_t s, int64_t e, int64_t h,
                       int64_t f) {
    for (int64_t i = 0; i <= e; i++) ends[i] = 0;
    for (int64_t p = 0; p < n * s; p++)
        if (0 <= ids[p] && ids[p] < e) ends[ids[p] + 1]++;
    for (int64_t i = 0; i < e; i++) ends[i + 1] += ends[i];
    for (int64_t p = 0; p < n * s; p++) /* afterwards ends[i] is the end of expert i */
        if (0 <= ids[p] && ids[p] < e) pairs[ends[ids[p]]++] = (int32_t)p;
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) if (!omp_in_parallel() && ends[e] * h * f > 65536)
#endif
    for (int64_t i = 0; i < e; i++) {
        const int64_t start = i ? ends[i - 1] : 0;
        if (ends[i] > start)
            NAME(expert)(x, pairs + start, ends[i] - start, w13 + i * 2 * f * h, w2 + i * h * f, out,
                         active + THREAD * n * s * f, s, h, f);
    }
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < h; c++) {
            float sum = 0;
            for (int64_t p = i * s; p < (i + 1) * s; p++)
                if (0 <= ids[p] && ids[p] < e) sum += weights[p] * out[p * h + c];
            sums[i * h + c] = sum;
        }
}
