/* Products with packed weights, included once per element type: T float or bf16, NAME(f) its f_f32 or f_bf16, DEPTH
 * inputs of a row that NAME(mac) processes together. Axes: n rows, k inputs (a multiple of DEPTH), m outputs.
 *
 * Packed: panels of COLUMNS outputs, zeros beyond m; in a panel, COLUMNS x DEPTH elements for each group of
 * DEPTH inputs. An output's sum runs over k in order, independent of other rows: bits do not depend on the batch. */

/* weight [m, k] -> packed, whose size is k times m rounded up to COLUMNS */
void NAME(pack)(const T *weight, T *packed, int64_t k, int64_t m) {
    PARALLEL_ROWS(k * m)
    for (int64_t j = 0; j < m; j += COLUMNS) {
        T *to = packed + j * k;
        for (int64_t i = 0; i < k; i += DEPTH)
            for (int64_t c = j; c < j + COLUMNS; c++)
                for (int64_t e = i; e < i + DEPTH; e++) *to++ = c < m ? weight[c * k + e] : (T)0;
    }
}

/* `rows` rows of x, k apart, times one panel -> out, m apart, of which `columns` columns exist. */
INLINE void NAME(tile)(const T *x, const T *panel, const T *bias, T *out, int64_t k, int64_t m, int64_t columns,
                       const int rows) {
    vf sums[rows][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (vf){0};
    for (int64_t i = 0; i < k; i += DEPTH, panel += COLUMNS * DEPTH)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums[r][0] = NAME(mac)(sums[r][0], x + r * k + i, panel);
            sums[r][1] = NAME(mac)(sums[r][1], x + r * k + i, panel + LANES * DEPTH);
        }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t at = half * LANES, num_left = columns - at;
            if (num_left <= 0) break;
            vf y = sums[r][half];
            if (bias) y += num_left < LANES ? NAME(load_part)(bias + at, num_left) : NAME(load)(bias + at);
            if (num_left < LANES) NAME(store_part)(out + r * m + at, y, num_left);
            else NAME(store)(out + r * m + at, y);
        }
}

#define TILE(R) \
    for (; i + R <= stop; i += R) NAME(tile)(x + i * k, panel, bias ? bias + j : 0, out + i * m + j, k, m, m - j, R)

/* Panels first <= p < last of out [n, m] = x [n, k] packed^T + bias [m] (or null). Rows in blocks that stay in the cache. */
INLINE void NAME(panels)(const T *x, const T *packed, const T *bias, T *out, int64_t n, int64_t k, int64_t m,
                         int64_t first, int64_t last) {
    for (int64_t start = 0; start < n; start += 96) {
        const int64_t stop = start + 96 < n ? start + 96 : n;
        for (int64_t p = first; p < last; p++) {
            const int64_t j = p * COLUMNS;
            const T *panel = packed + j * k;
            int64_t i = start;
            TILE(12);
            TILE(8);
            TILE(4);
            TILE(2);
            TILE(1);
        }
    }
}
#undef TILE

INLINE void NAME(rows_product)(const T *x, const T *packed, const T *bias, T *out, int64_t n, int64_t k, int64_t m) {
    NAME(panels)(x, packed, bias, out, n, k, m, 0, (m + COLUMNS - 1) / COLUMNS);
}

/* The complete product; threads split rows if there are enough, else panels. */
void NAME(product)(const T *x, const T *packed, const T *bias, T *out, int64_t n, int64_t k, int64_t m) {
    const int64_t count = (m + COLUMNS - 1) / COLUMNS;
    PARALLEL(n * k * m > 1 << 20) {
        const int64_t num_threads = TEAM, thread = THREAD;
        if (n >= 12 * num_threads) {
            const int64_t lo = n * thread / num_threads, hi = n * (thread + 1) / num_threads;
            NAME(panels)(x + lo * k, packed, bias, out + lo * m, hi - lo, k, m, 0, count);
        } else NAME(panels)(x, packed, bias, out, n, k, m, count * thread / num_threads, count * (thread + 1) / num_threads);
    }
}
