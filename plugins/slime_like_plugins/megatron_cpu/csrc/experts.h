/* Products of the rows of several experts with each expert's weight, included once per element type. They are computed
 * from units of 4 bytes: a float, or a pair of bf16 that are adjacent in the summed dimension. Each element of a result is
 * summed in a fixed order by one thread, so that bits do not depend on other rows or threads.
 * Axes: e experts, whose rows are bounds[e] to bounds[e + 1]; k units that are summed, m columns of the result. */

/* panel [k, COLUMNS]: the transpose of `columns` rows of a matrix [.., k], 0 beyond `columns` */
INLINE void NAME(pack_transposed)(const NAME(unit) *from, int64_t k, int64_t columns, NAME(unit) *panel) {
    for (int64_t i = 0; i < k; i += LANES)
        for (int64_t c = 0; c < COLUMNS; c += LANES) {
            const int64_t stop = i + LANES < k ? i + LANES : k;
            if (stop == i + LANES && c + LANES <= columns)
                transpose_square((const uint32_t *)(from + c * k + i), k, (uint32_t *)(panel + i * COLUMNS + c), COLUMNS);
            else
                for (int64_t j = i; j < stop; j++)
                    for (int64_t n = c; n < c + LANES; n++) panel[j * COLUMNS + n] = n < columns ? from[n * k + j] : 0;
        }
}

/* panel [n / DEPTH, width] of `columns` columns of n rows of a matrix [.., stride], 0 beyond n and `columns` */
INLINE void NAME(pack)(const T *from, int64_t stride, int64_t n, int64_t columns, const int64_t width,
                       NAME(unit) *panel) {
    T zeros[COLUMNS] = {0}, part[2][COLUMNS] = {{0}};
    for (int64_t i = 0; i < n; i += NAME(depth), panel += width) {
        const T *row[2] = {from + i * stride, i + 1 < n ? from + (i + 1) * stride : zeros};
        if (columns < width)
            for (int d = 0; d < 2; d++) row[d] = memcpy(part[d], row[d], columns * sizeof(T));
        EACH_LANE for (int64_t c = 0; c < width; c++) panel[c] = NAME(join)(row[0][c], row[1][c]);
    }
}

/* A tile [rows, COLUMNS] of a result: a panel times `rows` rows, whose units are at a[r * row + u * step]. Sums start from
 * `partial`, except in the first part, and are stored in `partial`, except in the last part, which is stored in `out`. */
INLINE void NAME(expert_tile)(const NAME(unit) *a, int64_t row, int64_t step, const NAME(unit) *panel, int64_t k,
                              float *partial, int is_first, int is_last, T *out, int64_t m, int64_t columns,
                              const int rows) {
    vf sums[rows][2];
    for (int r = 0; r < rows && is_last; r++) /* prefetches the outputs while the sums are computed */
        for (int64_t at = 0; at < COLUMNS * sizeof(T); at += CACHE_LINE) __builtin_prefetch((char *)(out + r * m) + at, 1);
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = is_first ? (vf){0} : get(partial + r * COLUMNS + half * LANES);
    for (int64_t u = 0; u < k; u++, panel += COLUMNS)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sums[r][0] = NAME(mac)(sums[r][0], a[r * row + u * step], panel);
            sums[r][1] = NAME(mac)(sums[r][1], a[r * row + u * step], panel + LANES);
        }
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            const int64_t at = half * LANES;
            if (!is_last) put(partial + r * COLUMNS + at, sums[r][half]);
            else if (columns - at >= LANES) NAME(put)(out + r * m + at, sums[r][half]);
            else if (columns > at) {
                T last[LANES];
                NAME(put)(last, sums[r][half]);
                memcpy(out + r * m + at, last, (columns - at) * sizeof(T));
            }
        }
}

/* For the first panel, each tile prefetches the rows of the next tile from memory. */
#define TILE(R)                                                                                                        \
    for (; i + R <= stop; i += R) {                                                                                    \
        for (int64_t u = 0; u < R * k && j == 0; u += CACHE_LINE / sizeof *x) __builtin_prefetch(x + (i + R) * k + u); \
        NAME(expert_tile)(x + i * k, k, 1, panel, k, 0, 1, 1, out + i * m + j, m, m - j, R);                           \
    }

/* out [n, m] = the rows x [n, DEPTH k] of each expert times its weight [DEPTH k, m], or the transpose of [m, DEPTH k].
 * scratch [threads, k, COLUMNS] */
void NAME(expert_products)(const T *inputs, const T *const *weights, const int64_t *bounds, T *out, NAME(unit) *scratch,
                           int64_t e, int64_t k, int64_t m, int64_t transpose, int threads) {
    const NAME(unit) *x = (const NAME(unit) *)inputs;
    const int64_t block = ROW_UNITS / k / ROWS_OF_TILE * ROWS_OF_TILE + ROWS_OF_TILE; /* rows that stay in the cache */
    int64_t num_parts = 0;
    for (int64_t i = 0; i < e; i++) num_parts += (bounds[i + 1] - bounds[i] + block - 1) / block;
    SHARED(threads) {
        NAME(unit) *panel = scratch + THREAD * k * COLUMNS;
        PARTS for (int64_t part = 0; part < num_parts; part++) {
            int64_t expert = 0, index = part;
            for (int64_t n; n = (bounds[expert + 1] - bounds[expert] + block - 1) / block, index >= n; expert++) index -= n;
            const int64_t start = bounds[expert] + index * block;
            const int64_t stop = start + block < bounds[expert + 1] ? start + block : bounds[expert + 1];
            const T *weight = weights[expert];
            for (int64_t j = 0; j < m; j += COLUMNS) {
                const int64_t columns = m - j < COLUMNS ? m - j : COLUMNS;
                if (transpose) NAME(pack_transposed)((const NAME(unit) *)weight + j * k, k, columns, panel);
                else NAME(pack)(weight + j, m, k * NAME(depth), columns, COLUMNS, panel);
                int64_t i = start;
                TILE(12);
                TILE(8);
                TILE(4);
                TILE(2);
                TILE(1);
            }
        }
    }
}
#undef TILE

/* Gradients out [e, o, m] of the weights: each expert's gradients [.., o], transposed, times its rows [.., m].
 * scratch [threads, GRAD_ROWS / DEPTH (GRAD_OUTPUTS + COLUMNS) + GRAD_OUTPUTS (m rounded up to COLUMNS)] */
void NAME(expert_gradients)(const T *grads, const T *rows, const int64_t *bounds, T *out, NAME(unit) *scratch, int64_t e,
                            int64_t o, int64_t m, int threads) {
    const int64_t width = (m + COLUMNS - 1) / COLUMNS * COLUMNS, num_blocks = (o + GRAD_OUTPUTS - 1) / GRAD_OUTPUTS;
    const int64_t depth = GRAD_ROWS / NAME(depth);
    SHARED(threads) {
        NAME(unit) *tiles = scratch + THREAD * (depth * (GRAD_OUTPUTS + COLUMNS) + GRAD_OUTPUTS * width);
        NAME(unit) *panel = tiles + depth * GRAD_OUTPUTS;
        float *sums = (float *)(panel + depth * COLUMNS);
        PARTS for (int64_t part = 0; part < e * num_blocks; part++) {
            const int64_t expert = part / num_blocks, first = part % num_blocks * GRAD_OUTPUTS;
            const int64_t last = first + GRAD_OUTPUTS < o ? first + GRAD_OUTPUTS : o;
            const int64_t begin = bounds[expert], end = bounds[expert + 1];
            T *to = out + expert * o * m;
            if (begin == end) memset(to + first * m, 0, (last - first) * m * sizeof(T));
            for (int64_t r = begin; r < end; r += GRAD_ROWS) {
                const int64_t n = end - r < GRAD_ROWS ? end - r : GRAD_ROWS, k = (n + NAME(depth) - 1) / NAME(depth);
                for (int64_t i = first; i < last; i += ROWS_OF_TILE)
                    NAME(pack)(grads + r * o + i, o, n, last - i < ROWS_OF_TILE ? last - i : ROWS_OF_TILE, ROWS_OF_TILE,
                               tiles + (i - first) * depth);
                for (int64_t j = 0; j < m; j += COLUMNS) {
                    const int64_t columns = m - j < COLUMNS ? m - j : COLUMNS;
                    NAME(pack)(rows + r * m + j, m, n, columns, COLUMNS, panel);
                    for (int64_t i = first; i < last; i += ROWS_OF_TILE) {
                        const int64_t at = i - first, count = last - i < ROWS_OF_TILE ? last - i : ROWS_OF_TILE;
                        float *partial = sums + at * width + j * ROWS_OF_TILE;
                        T full[ROWS_OF_TILE * COLUMNS], *target = count == ROWS_OF_TILE ? to + i * m + j : full;
                        NAME(expert_tile)(tiles + at * depth, 1, ROWS_OF_TILE, panel, k, partial, r == begin,
                                          r + GRAD_ROWS >= end, target, target == full ? COLUMNS : m, columns,
                                          ROWS_OF_TILE);
                        if (target == full && r + GRAD_ROWS >= end)
                            for (int64_t c = 0; c < count; c++)
                                memcpy(to + (i + c) * m + j, full + c * COLUMNS, columns * sizeof(T));
                    }
                }
            }
        }
    }
}
