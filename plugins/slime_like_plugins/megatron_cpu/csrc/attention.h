/* Causal attention over packed sequences, included once per element type. A unit of work is a KV head
 * of a sequence: it fits in cache, and one thread sums its gradients in a fixed order.
 * Axes: s sequences with bounds cu [s + 1], n tokens, g groups (KV heads), r query heads per group, d head dimension. */

/* queries [n, g r, d], keys, values [n, g, d] -> out [n, g r, d], log_sums [n, g r]. capacity: a multiple of 32, at least
 * the length of every sequence. scratch [threads, d capacity + QUERIES (capacity + d)]. */
void NAME(attention)(const float *queries, const float *keys, const float *values, const int32_t *cu, T *out,
                     float *log_sums, float *scratch, int64_t s, int64_t capacity, int64_t g, int64_t r, int64_t d,
                     float scale, int threads) {
    SHARED(threads) {
        float *transposed_keys = scratch + THREAD * (d * capacity + QUERIES * (capacity + d));
        float *weights = transposed_keys + d * capacity, *sums = weights + QUERIES * capacity;
        PARTS for (int64_t part = 0; part < s * g; part++) {
            const int64_t first = cu[part / g], length = cu[part / g + 1] - first, group = part % g;
            const float *value = values + (first * g + group) * d;
            transpose(keys + (first * g + group) * d, g * d, length, transposed_keys, capacity, d);
            for (int64_t head = group * r; head < (group + 1) * r; head++)
                for (int64_t i = 0; i < length; i += QUERIES) {
                    const int64_t num_queries = length - i < QUERIES ? length - i : QUERIES, columns = i + num_queries;
                    const float *row[QUERIES];
                    for (int64_t q = 0; q < QUERIES; q++)
                        row[q] = queries + ((first + i + (q < num_queries ? q : 0)) * g * r + head) * d;
                    dots(row, transposed_keys, capacity, d, columns, scale, weights);
                    for (int64_t q = 0; q < QUERIES; q++) {
                        const float sum = softmax(weights + q * capacity, q < num_queries ? i + q + 1 : 1, columns);
                        if (q < num_queries) log_sums[(first + i + q) * g * r + head] = sum;
                    }
                    weighted_sums(weights, capacity, value, g * d, columns, d, sums);
                    for (int64_t q = 0; q < num_queries; q++) {
                        T *o = out + ((first + i + q) * g * r + head) * d;
                        EACH_LANE for (int64_t c = 0; c < d; c++) o[c] = NAME(store)(sums[q * d + c]);
                    }
                }
        }
    }
}

/* Backward: grad_out [n, g r, d] -> gradients of queries, keys and values. The caller sets the gradients of keys and values
 * to 0. scratch: twice the size that attention needs. */
void NAME(attention_back)(const float *queries, const float *keys, const float *values, const int32_t *cu,
                          const float *log_sums, const T *grad_out, float *grad_queries, float *grad_keys,
                          float *grad_values, float *scratch, int64_t s, int64_t capacity, int64_t g, int64_t r, int64_t d,
                          float scale, int threads) {
    SHARED(threads) {
        float *transposed_keys = scratch + THREAD * 2 * (d * capacity + QUERIES * (capacity + d));
        float *transposed_values = transposed_keys + d * capacity, *weights = transposed_values + d * capacity;
        float *grads = weights + QUERIES * capacity, *grad_rows = grads + QUERIES * capacity;
        float *sums = grad_rows + QUERIES * d;
        PARTS for (int64_t part = 0; part < s * g; part++) {
            const int64_t first = cu[part / g], length = cu[part / g + 1] - first, group = part % g;
            const int64_t offset = (first * g + group) * d;
            transpose(keys + offset, g * d, length, transposed_keys, capacity, d);
            transpose(values + offset, g * d, length, transposed_values, capacity, d);
            for (int64_t head = group * r; head < (group + 1) * r; head++)
                for (int64_t i = 0; i < length; i += QUERIES) {
                    const int64_t num_queries = length - i < QUERIES ? length - i : QUERIES, columns = i + num_queries;
                    const float *row[QUERIES], *grad_row[QUERIES];
                    for (int64_t q = 0; q < QUERIES; q++) {
                        const int64_t token = ((first + i + (q < num_queries ? q : 0)) * g * r + head) * d;
                        row[q] = queries + token;
                        grad_row[q] = grad_rows + q * d;
                        EACH_LANE for (int64_t c = 0; c < d; c++) grad_rows[q * d + c] = NAME(load)(grad_out[token + c]);
                    }
                    dots(row, transposed_keys, capacity, d, columns, scale, weights);
                    dots(grad_row, transposed_values, capacity, d, columns, 1.0f, grads);
                    for (int64_t q = 0; q < QUERIES; q++) {
                        float *w = weights + q * capacity, *gw = grads + q * capacity, dot = 0;
                        const int64_t num_visible = q < num_queries ? i + q + 1 : 0;
                        const float sum = q < num_queries ? log_sums[(first + i + q) * g * r + head] : 0;
                        SUM_OF(dot) for (int64_t j = 0; j < num_visible; j++) {
                            w[j] = exponential(w[j] - sum);
                            dot += w[j] * gw[j];
                        }
                        EACH_LANE for (int64_t j = 0; j < num_visible; j++) gw[j] = w[j] * (gw[j] - dot) * scale;
                        for (int64_t j = num_visible; j < columns; j++) w[j] = gw[j] = 0;
                    }
                    weighted_sums(grads, capacity, keys + offset, g * d, columns, d, sums);
                    for (int64_t q = 0; q < num_queries; q++)
                        memcpy(grad_queries + ((first + i + q) * g * r + head) * d, sums + q * d, d * sizeof(float));
                    add_weighted(grads, capacity, row, grad_keys + offset, g * d, columns, d);
                    add_weighted(weights, capacity, grad_row, grad_values + offset, g * d, columns, d);
                }
        }
    }
}
