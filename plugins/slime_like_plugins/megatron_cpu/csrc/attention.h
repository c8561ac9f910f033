/* Causal attention over packed sequences, included once per element type. A sequence's KV head is one unit of work:
 * it fits in cache, and one thread sums its gradients in a fixed order.
 * Axes: s sequences with bounds cu [s + 1], n tokens, g groups (KV heads), r query heads per group, d head dimension. */

/* queries [n, g r, d], keys, values [n, g, d] -> out [n, g r, d], log_sums [n, g r]. room: a multiple of 32, at least as
 * long as every sequence. scratch [threads, d room + QUERIES (room + d)]. */
void NAME(attention)(const float *queries, const float *keys, const float *values, const int32_t *cu, T *out,
                     float *log_sums, float *scratch, int64_t s, int64_t room, int64_t g, int64_t r, int64_t d, float scale,
                     int threads) {
    SHARED(threads) {
        float *turned = scratch + THREAD * (d * room + QUERIES * (room + d));
        float *weights = turned + d * room, *mixed = weights + QUERIES * room;
        PARTS for (int64_t part = 0; part < s * g; part++) {
            const int64_t first = cu[part / g], length = cu[part / g + 1] - first, group = part % g;
            const float *value = values + (first * g + group) * d;
            transpose(keys + (first * g + group) * d, g * d, length, turned, room, d);
            for (int64_t head = group * r; head < (group + 1) * r; head++)
                for (int64_t i = 0; i < length; i += QUERIES) {
                    const int64_t count = length - i < QUERIES ? length - i : QUERIES, columns = i + count;
                    const float *row[QUERIES];
                    for (int64_t q = 0; q < QUERIES; q++)
                        row[q] = queries + ((first + i + (q < count ? q : 0)) * g * r + head) * d;
                    dots(row, turned, room, d, columns, scale, weights);
                    for (int64_t q = 0; q < QUERIES; q++) {
                        const float sum = softmax(weights + q * room, q < count ? i + q + 1 : 1, columns);
                        if (q < count) log_sums[(first + i + q) * g * r + head] = sum;
                    }
                    mix(weights, room, value, g * d, columns, d, mixed);
                    for (int64_t q = 0; q < count; q++) {
                        T *o = out + ((first + i + q) * g * r + head) * d;
                        EACH_LANE for (int64_t c = 0; c < d; c++) o[c] = NAME(store)(mixed[q * d + c]);
                    }
                }
        }
    }
}

/* Backward: grad_out [n, g r, d] -> gradients of queries, keys and values; the last two start at 0. scratch: twice the
 * size. */
void NAME(attention_back)(const float *queries, const float *keys, const float *values, const int32_t *cu,
                          const float *log_sums, const T *grad_out, float *grad_queries, float *grad_keys,
                          float *grad_values, float *scratch, int64_t s, int64_t room, int64_t g, int64_t r, int64_t d,
                          float scale, int threads) {
    SHARED(threads) {
        float *turned = scratch + THREAD * 2 * (d * room + QUERIES * (room + d));
        float *turned_values = turned + d * room, *weights = turned_values + d * room, *grads = weights + QUERIES * room;
        float *given = grads + QUERIES * room, *mixed = given + QUERIES * d;
        PARTS for (int64_t part = 0; part < s * g; part++) {
            const int64_t first = cu[part / g], length = cu[part / g + 1] - first, group = part % g;
            const int64_t at = (first * g + group) * d;
            transpose(keys + at, g * d, length, turned, room, d);
            transpose(values + at, g * d, length, turned_values, room, d);
            for (int64_t head = group * r; head < (group + 1) * r; head++)
                for (int64_t i = 0; i < length; i += QUERIES) {
                    const int64_t count = length - i < QUERIES ? length - i : QUERIES, columns = i + count;
                    const float *row[QUERIES], *gave[QUERIES];
                    for (int64_t q = 0; q < QUERIES; q++) {
                        const int64_t token = ((first + i + (q < count ? q : 0)) * g * r + head) * d;
                        row[q] = queries + token;
                        gave[q] = given + q * d;
                        EACH_LANE for (int64_t c = 0; c < d; c++) given[q * d + c] = NAME(load)(grad_out[token + c]);
                    }
                    dots(row, turned, room, d, columns, scale, weights);
                    dots(gave, turned_values, room, d, columns, 1.0f, grads);
                    for (int64_t q = 0; q < QUERIES; q++) {
                        float *w = weights + q * room, *gw = grads + q * room, along = 0;
                        const int64_t seen = q < count ? i + q + 1 : 0;
                        const float sum = q < count ? log_sums[(first + i + q) * g * r + head] : 0;
                        SUM_OF(along) for (int64_t j = 0; j < seen; j++) {
                            w[j] = exponential(w[j] - sum);
                            along += w[j] * gw[j];
                        }
                        EACH_LANE for (int64_t j = 0; j < seen; j++) gw[j] = w[j] * (gw[j] - along) * scale;
                        for (int64_t j = seen; j < columns; j++) w[j] = gw[j] = 0;
                    }
                    mix(grads, room, keys + at, g * d, columns, d, mixed);
                    for (int64_t q = 0; q < count; q++)
                        memcpy(grad_queries + ((first + i + q) * g * r + head) * d, mixed + q * d, d * sizeof(float));
                    share(grads, room, row, grad_keys + at, g * d, columns, d);
                    share(weights, room, gave, grad_values + at, g * d, columns, d);
                }
        }
    }
}
