/* Included once per element type: T float or bf16, NAME(f) its f_f32 or f_bf16.
 * Axes: n rows (tokens), h hidden, g groups (KV heads), r query heads per group, d head dimension. */

/* RMSNorm. x, out [n, h]; weight [h]; inverse [n]: one over the root mean square, for the backward. */
void NAME(rms_norm)(const T *x, const T *weight, T *out, float *inverse, int64_t n, int64_t h, float eps, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *xi = x + i * h;
            T *oi = out + i * h;
            float squares = 0;
            SUM_OF(squares) for (int64_t j = 0; j < h; j++) squares += NAME(load)(xi[j]) * NAME(load)(xi[j]);
            const float scale = inverse[i] = 1.0f / sqrtf(squares / (float)h + eps);
            EACH_LANE for (int64_t j = 0; j < h; j++)
                oi[j] = NAME(store)(NAME(load)(xi[j]) * scale * NAME(load)(weight[j]));
        }
    }
}

/* Backward: grad_out [n, h] -> grad_x [n, h] and grad_weight [threads, h], which the caller sets to 0. */
void NAME(rms_norm_back)(const T *x, const T *weight, const float *inverse, const T *grad_out, T *grad_x,
                         float *grad_weight, int64_t n, int64_t h, int threads) {
    SHARED(threads) {
        float *gw = grad_weight + THREAD * h;
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *xi = x + i * h, *gi = grad_out + i * h;
            T *oi = grad_x + i * h;
            const float scale = inverse[i];
            float dot = 0;
            SUM_OF(dot) for (int64_t j = 0; j < h; j++) {
                const float g = NAME(load)(gi[j]), normed = NAME(load)(xi[j]) * scale;
                gw[j] += g * normed;
                dot += g * NAME(load)(weight[j]) * normed;
            }
            dot /= (float)h;
            EACH_LANE for (int64_t j = 0; j < h; j++) {
                const float g = NAME(load)(gi[j]) * NAME(load)(weight[j]);
                oi[j] = NAME(store)(scale * (g - NAME(load)(xi[j]) * scale * dot));
            }
        }
    }
}

/* gate_up [n, 2 h] -> out [n, h] = silu(gate) * up, times scale [n] unless it is null */
void NAME(swiglu)(const T *gate_up, const float *scale, T *out, int64_t n, int64_t h, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *gate = gate_up + i * 2 * h, *up = gate + h;
            T *oi = out + i * h;
            const float c = scale ? scale[i] : 1.0f;
            EACH_LANE for (int64_t j = 0; j < h; j++) {
                const float a = NAME(load)(gate[j]);
                oi[j] = NAME(store)(a * sigmoid(a) * NAME(load)(up[j]) * c);
            }
        }
    }
}

/* Backward: grad_out [n, h] -> grad_gate_up [n, 2 h], and grad_scale [n] if there is a scale */
void NAME(swiglu_back)(const T *gate_up, const float *scale, const T *grad_out, T *grad_gate_up, float *grad_scale,
                       int64_t n, int64_t h, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *gate = gate_up + i * 2 * h, *up = gate + h, *gi = grad_out + i * h;
            T *to_gate = grad_gate_up + i * 2 * h, *to_up = to_gate + h;
            const float c = scale ? scale[i] : 1.0f;
            float dot = 0;
            SUM_OF(dot) for (int64_t j = 0; j < h; j++) {
                const float a = NAME(load)(gate[j]), u = NAME(load)(up[j]), s = sigmoid(a), g = NAME(load)(gi[j]);
                dot += g * a * s * u;
                to_up[j] = NAME(store)(c * g * a * s);
                to_gate[j] = NAME(store)(c * g * u * s * (1.0f + a * (1.0f - s)));
            }
            if (scale) grad_scale[i] = dot;
        }
    }
}

/* One head: RMSNorm (if there is a weight), then rotation of halves. cos_sin [d]: cosines, then sines, of d / 2
 * angles each. Returns one over the root mean square. */
INLINE float NAME(norm_rotate)(const T *x, const T *weight, const float *cos_sin, float *out, int64_t d, float eps) {
    const int64_t half = d / 2;
    float scale = 1.0f;
    if (weight) {
        float squares = 0;
        SUM_OF(squares) for (int64_t j = 0; j < d; j++) squares += NAME(load)(x[j]) * NAME(load)(x[j]);
        scale = 1.0f / sqrtf(squares / (float)d + eps);
    }
    EACH_LANE for (int64_t j = 0; j < half; j++) {
        const float c = cos_sin[j], s = cos_sin[half + j];
        const float a = NAME(load)(x[j]) * (weight ? scale * NAME(load)(weight[j]) : 1.0f);
        const float b = NAME(load)(x[half + j]) * (weight ? scale * NAME(load)(weight[half + j]) : 1.0f);
        out[j] = a * c - b * s;
        out[half + j] = b * c + a * s;
    }
    return scale;
}

/* Backward of a head. Adds to grad_weight [d]; `unrotated` [d] is scratch. */
INLINE void NAME(norm_rotate_back)(const T *x, const T *weight, const float *cos_sin, float scale, const float *grad_out,
                                   T *grad_x, float *grad_weight, float *unrotated, int64_t d) {
    const int64_t half = d / 2;
    EACH_LANE for (int64_t j = 0; j < half; j++) {
        const float c = cos_sin[j], s = cos_sin[half + j];
        unrotated[j] = grad_out[j] * c + grad_out[half + j] * s;
        unrotated[half + j] = grad_out[half + j] * c - grad_out[j] * s;
    }
    if (!weight) {
        EACH_LANE for (int64_t j = 0; j < d; j++) grad_x[j] = NAME(store)(unrotated[j]);
        return;
    }
    float dot = 0;
    SUM_OF(dot) for (int64_t j = 0; j < d; j++) {
        const float normed = NAME(load)(x[j]) * scale;
        grad_weight[j] += unrotated[j] * normed;
        unrotated[j] *= NAME(load)(weight[j]);
        dot += unrotated[j] * normed;
    }
    dot /= (float)d;
    EACH_LANE for (int64_t j = 0; j < d; j++)
        grad_x[j] = NAME(store)(scale * (unrotated[j] - NAME(load)(x[j]) * scale * dot));
}

/* mixed [n, g, r + 2, d]: query heads, key and value of each group -> float32 queries [n, g r, d], keys and values
 * [n, g, d]; queries and keys with norm (weights [d] or null) and rotation (cos_sin [n, d]). inverse [n, g, r + 1]. */
void NAME(split_rotate)(const T *mixed, const T *q_weight, const T *k_weight, const float *cos_sin, float *queries,
                        float *keys, float *values, float *inverse, int64_t n, int64_t g, int64_t r, int64_t d,
                        float eps, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++)
            for (int64_t group = 0; group < g; group++) {
                const int64_t pair = i * g + group;
                const T *head = mixed + pair * (r + 2) * d;
                const float *angles = cos_sin + i * d;
                for (int64_t q = 0; q < r; q++, head += d)
                    inverse[pair * (r + 1) + q] =
                        NAME(norm_rotate)(head, q_weight, angles, queries + (pair * r + q) * d, d, eps);
                inverse[pair * (r + 1) + r] = NAME(norm_rotate)(head, k_weight, angles, keys + pair * d, d, eps);
                head += d;
                EACH_LANE for (int64_t j = 0; j < d; j++) values[pair * d + j] = NAME(load)(head[j]);
            }
    }
}

/* Backward. The caller sets grad_weights [threads, 2, d] (queries, keys) to 0. scratch [threads, d]. */
void NAME(split_rotate_back)(const T *mixed, const T *q_weight, const T *k_weight, const float *cos_sin,
                             const float *inverse, const float *grad_queries, const float *grad_keys,
                             const float *grad_values, T *grad_mixed, float *grad_weights, float *scratch, int64_t n,
                             int64_t g, int64_t r, int64_t d, int threads) {
    SHARED(threads) {
        float *gw = grad_weights + THREAD * 2 * d, *unrotated = scratch + THREAD * d;
        ROWS for (int64_t i = 0; i < n; i++)
            for (int64_t group = 0; group < g; group++) {
                const int64_t pair = i * g + group;
                const float *angles = cos_sin + i * d, *scales = inverse + pair * (r + 1);
                const T *head = mixed + pair * (r + 2) * d;
                T *out = grad_mixed + pair * (r + 2) * d;
                for (int64_t q = 0; q < r; q++, head += d, out += d)
                    NAME(norm_rotate_back)(head, q_weight, angles, scales[q], grad_queries + (pair * r + q) * d, out, gw,
                                           unrotated, d);
                NAME(norm_rotate_back)(head, k_weight, angles, scales[r], grad_keys + pair * d, out, gw + d, unrotated, d);
                out += d;
                EACH_LANE for (int64_t j = 0; j < d; j++) out[j] = NAME(store)(grad_values[pair * d + j]);
            }
    }
}
