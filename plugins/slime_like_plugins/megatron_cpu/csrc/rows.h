/* Products of attention on QUERIES query rows at a time, in registers. Vectors are extensions of GCC and Clang, for any
 * CPU. Axes: d head dimension, a multiple of LANES; columns: keys. Rows of weights have `capacity` elements, a multiple
 * of 2 LANES. */
#define LANES 16
#define QUERIES 8

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vf get(const float *p) { return *(const vf *)p; }
INLINE void put(float *p, vf x) { *(vf *)p = x; }

/* from [n, stride] -> to [d, capacity], n <= capacity; unused columns are 0. */
INLINE void transpose(const float *from, int64_t stride, int64_t n, float *to, int64_t capacity, int64_t d) {
    for (int64_t c = 0; c < d; c++) {
        for (int64_t j = 0; j < n; j++) to[c * capacity + j] = from[j * stride + c];
        for (int64_t j = n; j < capacity; j++) to[c * capacity + j] = 0;
    }
}

/* weights[r, j] = scale * row[r] . keys[:, j] of transposed keys [d, capacity], j < columns rounded up to 2 LANES */
INLINE void dots(const float *const row[QUERIES], const float *keys, int64_t capacity, int64_t d, int64_t columns,
                 float scale, float *weights) {
    for (int64_t j = 0; j < columns; j += 2 * LANES) {
        vf low[QUERIES] = {0}, high[QUERIES] = {0};
        for (int64_t c = 0; c < d; c++) {
            const vf a = get(keys + c * capacity + j), b = get(keys + c * capacity + j + LANES);
            for (int r = 0; r < QUERIES; r++) {
                low[r] += row[r][c] * a;
                high[r] += row[r][c] * b;
            }
        }
        for (int r = 0; r < QUERIES; r++) {
            put(weights + r * capacity + j, low[r] * scale);
            put(weights + r * capacity + j + LANES, high[r] * scale);
        }
    }
}

/* out[r, :] = sum over j < columns of weights[r, j] * values[j, :], rows of values `stride` apart; out [QUERIES, d] */
INLINE void weighted_sums(const float *weights, int64_t capacity, const float *values, int64_t stride, int64_t columns,
                          int64_t d, float *out) {
    for (int64_t c = 0; c < d; c += LANES) {
        vf sum[QUERIES] = {0};
        for (int64_t j = 0; j < columns; j++) {
            const vf x = get(values + j * stride + c);
            for (int r = 0; r < QUERIES; r++) sum[r] += weights[r * capacity + j] * x;
        }
        for (int r = 0; r < QUERIES; r++) put(out + r * d + c, sum[r]);
    }
}

/* to[j, :] += sum over r of weights[r, j] * row[r], rows of `to` `stride` apart */
INLINE void add_weighted(const float *weights, int64_t capacity, const float *const row[QUERIES], float *to,
                         int64_t stride, int64_t columns, int64_t d) {
    for (int64_t c = 0; c < d; c += LANES) {
        vf x[QUERIES];
        for (int r = 0; r < QUERIES; r++) x[r] = get(row[r] + c);
        for (int64_t j = 0; j < columns; j++) {
            vf sum = get(to + j * stride + c);
            for (int r = 0; r < QUERIES; r++) sum += weights[r * capacity + j] * x[r];
            put(to + j * stride + c, sum);
        }
    }
}

/* Replace the scores [n] of a query by softmax weights: over the first `num_visible`, 0 for the others. Returns the
 * log-sum-exp. */
INLINE float softmax(float *scores, int64_t num_visible, int64_t n) {
    float top = scores[0], sum = 0;
    MAX_OF(top) for (int64_t j = 0; j < num_visible; j++) top = scores[j] > top ? scores[j] : top;
    SUM_OF(sum) for (int64_t j = 0; j < num_visible; j++) sum += scores[j] = exponential(scores[j] - top);
    const float inverse = 1.0f / sum;
    EACH_LANE for (int64_t j = 0; j < num_visible; j++) scores[j] *= inverse;
    for (int64_t j = num_visible; j < n; j++) scores[j] = 0;
    return top + logf(sum);
}
