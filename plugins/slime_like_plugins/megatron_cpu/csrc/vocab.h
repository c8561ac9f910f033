/* Log-probabilities of target tokens from rows of logits, included once per element type.
 * Axes: n rows (tokens), v vocabulary. `scale` is one over the temperature. */

/* logits [n, v], target [n] -> logprobs [n], log_sums [n] (logarithms of the sums of exponentials of scaled logits)
 * and, if not null, entropies [n].
 * Sums over the vocabulary are in float32 within BLOCK columns and in float64 over blocks. */
void NAME(log_probs)(const T *logits, const int64_t *target, float *logprobs, float *log_sums, float *entropies,
                     int64_t n, int64_t v, float scale, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *x = logits + i * v;
            float top = NAME(load)(x[0]);
            MAX_OF(top) for (int64_t j = 0; j < v; j++) {
                const float y = NAME(load)(x[j]);
                top = y > top ? y : top;
            }
            double total = 0, weighted_total = 0;
            for (int64_t start = 0; start < v; start += BLOCK) {
                const int64_t stop = start + BLOCK < v ? start + BLOCK : v;
                float sum = 0, weighted = 0;
                if (entropies)
                    SUM_OF(sum, weighted) for (int64_t j = start; j < stop; j++) {
                        const float y = (NAME(load)(x[j]) - top) * scale, e = exponential(y);
                        sum += e;
                        weighted += e * y;
                    }
                else
                    SUM_OF(sum) for (int64_t j = start; j < stop; j++)
                        sum += exponential((NAME(load)(x[j]) - top) * scale);
                total += sum;
                weighted_total += weighted;
            }
            const double log_total = log(total);
            logprobs[i] = (float)((NAME(load)(x[target[i]]) - top) * scale - log_total);
            log_sums[i] = (float)(top * scale + log_total);
            if (entropies) entropies[i] = (float)(log_total - weighted_total / total);
        }
    }
}

/* Backward: gradients of logprobs [n] and of entropies [n] (or null) -> grad_logits [n, v], which may overwrite logits. */
void NAME(log_probs_back)(const T *logits, const int64_t *target, const float *log_sums, const float *entropies,
                          const float *grad_logprobs, const float *grad_entropies, T *grad_logits, int64_t n, int64_t v,
                          float scale, int threads) {
    SHARED(threads) {
        ROWS for (int64_t i = 0; i < n; i++) {
            const T *x = logits + i * v;
            T *out = grad_logits + i * v;
            const float sum = log_sums[i], grad_logprob = grad_logprobs[i] * scale;
            const float target_logprob = NAME(load)(x[target[i]]) * scale - sum;
            float target_grad = 0;
            if (grad_entropies) {
                const float grad_entropy = grad_entropies[i] * scale, entropy = entropies[i];
                target_grad = grad_logprob -
                              exponential(target_logprob) * (grad_logprob + grad_entropy * (target_logprob + entropy));
                EACH_LANE for (int64_t j = 0; j < v; j++) {
                    const float y = NAME(load)(x[j]) * scale - sum;
                    out[j] = NAME(store)(-exponential(y) * (grad_logprob + grad_entropy * (y + entropy)));
                }
            } else {
                target_grad = grad_logprob - exponential(target_logprob) * grad_logprob;
                EACH_LANE for (int64_t j = 0; j < v; j++)
                    out[j] = NAME(store)(-exponential(NAME(load)(x[j]) * scale - sum) * grad_logprob);
            }
            out[target[i]] = NAME(store)(target_grad);
        }
    }
}
