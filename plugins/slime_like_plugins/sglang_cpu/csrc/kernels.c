/* Leaf kernels of decoding on a CPU: plain C, no libraries, pointers and sizes only. Called through ctypes.
 *
 * Every kernel computes in float32 and rounds once when it stores, for float32 and bfloat16. Vectors are those of GCC and
 * Clang (the widest of the compiling machine) and sums run over fixed lanes, so no -ffast-math is needed and NaN stays
 * NaN. Rows are independent and split among OpenMP's threads, if available.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif defined(__AVX__)
#define LANES 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define LANES 4
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef float vf_at __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t vh_at __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#if defined(_OPENMP)
#include <omp.h>
#define TEXT(x) #x
/* Forbid nested regions, which OMP_NESTED would allow: the buffers of a step have room for its own threads only. */
#define PARALLEL_ROWS(work) _Pragma(TEXT(omp parallel for schedule(static) if (!omp_in_parallel() && (work) > 65536)))
#define PARALLEL(condition) _Pragma(TEXT(omp parallel if (!omp_in_parallel() && (condition))))
#define THREAD omp_get_thread_num()
#define TEAM omp_get_num_threads()
#define THREADS omp_get_max_threads()
#else
#define PARALLEL_ROWS(work)
#define PARALLEL(condition)
#define THREAD 0
#define TEAM 1
#define THREADS 1
#endif

/* Maximum threads of the linked OpenMP library, which may differ from torch's. */
int64_t threads(void) { return THREADS; }

#if defined(__clang__) || __GNUC__ >= 12
INLINE vf pair_sums(vf a, vf b) { return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD); }
#else
INLINE vf pair_sums(vf a, vf b) { return __builtin_shuffle(a, b, (vi){EVEN}) + __builtin_shuffle(a, b, (vi){ODD}); }
#endif

INLINE vf broadcast(float x) { return x - (vf){0}; }

/* a * b + c, rounded once if the CPU has FMA. Left to a compiler, the rounding would depend on the surrounding code. */
#if defined(__AVX512F__)
INLINE vf fma_of(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#elif defined(__AVX__) && defined(__FMA__)
INLINE vf fma_of(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
INLINE vf fma_of(vf a, vf b, vf c) { return a * b + c; }
#endif

/* Lane j of the result is the sum over the lanes of v[j]. */
INLINE vf row_sums(vf *v) {
    for (int n = LANES; n > 1; n /= 2)
        for (int j = 0; j < n / 2; j++) v[j] = pair_sums(v[2 * j], v[2 * j + 1]);
    return v[0];
}

INLINE float lane_sum(vf v) {
    float s[LANES];
    memcpy(s, &v, sizeof s);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int j = 0; j < n; j++) s[j] += s[j + n];
    return s[0];
}

INLINE float lane_max(vf v) {
    float m = v[0];
    for (int j = 1; j < LANES; j++) m = v[j] > m ? v[j] : m;
    return m;
}

INLINE vf elementwise_max(vf a, vf b) {
    vi take = b > a;
    return (vf)(((vi)b & take) | ((vi)a & ~take));
}

/* exp by the reduction and polynomial of Cephes' expf (S. Moshier), within 2 units in the last place; below -87.3: 0. */
INLINE vf vexp(vf x) {
    vi tiny = x < -87.3f, huge = x > 88.3f;
    vf limit = broadcast(88.3f);
    x = (vf)(((vi)limit & huge) | ((vi)x & ~huge));
    x = (vf)((vi)x & ~tiny);
    vf n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)exponent) & ~tiny);
}

INLINE vf load_f32(const float *p) { return *(const vf_at *)p; }
INLINE void store_f32(float *p, vf x) { *(vf_at *)p = x; }
INLINE vf load_bf16(const bf16 *p) { return (vf)(__builtin_convertvector(*(const vh_at *)p, vu) << 16); }
INLINE void store_bf16(bf16 *p, vf x) {
    vi nan = x != x;
    vu bits = (vu)x;
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* to nearest, ties to even */
    bits = (bits & ~(vu)nan) | ((vu)nan & 0x7fc0u);
    *(vh_at *)p = __builtin_convertvector(bits, vh_at);
}

/* The first n < LANES elements, the others 0. */
INLINE vf load_part_f32(const float *p, int64_t n) {
    float t[LANES] = {0};
    memcpy(t, p, n * sizeof(float));
    return load_f32(t);
}
INLINE void store_part_f32(float *p, vf x, int64_t n) { memcpy(p, &x, n * sizeof(float)); }
INLINE vf load_part_bf16(const bf16 *p, int64_t n) {
    bf16 t[LANES] = {0};
    memcpy(t, p, n * sizeof(bf16));
    return load_bf16(t);
}
INLINE void store_part_bf16(bf16 *p, vf x, int64_t n) {
    bf16 t[LANES];
    store_bf16(t, x);
    memcpy(p, t, n * sizeof(bf16));
}

/* Prefetch: the rows of the KV pool of a request are scattered, so the processor cannot predict the next one. */
#define LOOKAHEAD 12
INLINE void prefetch(const void *p, int64_t bytes) {
    for (int64_t j = 0; j < bytes; j += 64) __builtin_prefetch((const char *)p + j);
}

/* ---- products: for CPUs without AMX, on which they were measured to be as fast as oneDNN's or faster ----------------*/
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#define PRODUCTS 1
#define COLUMNS (2 * LANES)
INLINE vf mac_f32(vf sum, const float *x, const float *w) { return sum + *x * load_f32(w); }
INLINE vf mac_bf16(vf sum, const bf16 *x, const bf16 *w) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(w));
}
#else
#define PRODUCTS 0
#endif

/* Return 1 if the products below, and decode steps with them, were compiled for this machine. */
int64_t has_products(void) { return PRODUCTS; }

#define T float
#define NAME(name) name##_f32
#define DEPTH 1
#include "typed.h"
#include "experts.h"
#if PRODUCTS
#include "product.h"
#include "step.h"
#endif
#undef T
#undef NAME
#undef DEPTH
#define T bf16
#define NAME(name) name##_bf16
#define DEPTH 2
#include "typed.h"
#include "experts.h"
#if PRODUCTS
#include "product.h"
#include "step.h"
#endif

/* ---- sampling: Axes n requests, v vocabulary ------------------------------------------------------------------------
 * SplitMix64's finaliser (Steele, Lea and Flood, 2014), as in slime_like_plugins/rollout_sampling/hooks.py. */
INLINE uint64_t mix_bits(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

INLINE double uniform(uint64_t seed, uint64_t position) {
    const uint64_t gamma = 0x9E3779B97F4A7C15ull;
    uint64_t state = mix_bits(seed + gamma);
    return (double)(mix_bits(state ^ mix_bits((position + 1) * gamma)) >> 11) * 0x1p-53;
}

void uniforms(const int64_t *seeds, const int64_t *positions, double *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = uniform((uint64_t)seeds[i], (uint64_t)positions[i]);
}

#define BLOCK 256

/* The first token whose running sum of weights exceeds the share u of the total; never a token of weight 0. */
INLINE int64_t inverse_cdf(const float *weights, const double *blocks, int64_t num_blocks, int64_t v, double u) {
    double total = 0;
    for (int64_t b = 0; b < num_blocks; b++) total += blocks[b];
    double target = u * total, sum = 0;
    int64_t last = 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        if (sum + blocks[b] <= target && b + 1 < num_blocks) {
            if (blocks[b] > 0) last = -b - 1;
            sum += blocks[b];
            continue;
        }
        int64_t stop = (b + 1) * BLOCK < v ? (b + 1) * BLOCK : v;
        for (int64_t j = b * BLOCK; j < stop; j++) {
            sum += weights[j];
            if (weights[j] > 0) {
                last = j;
                if (sum > target) return j;
            }
        }
    }
    for (int64_t j = -last * BLOCK - 1; last < 0; j--) /* rounding passed the end, in a block of zeros */
        if (weights[j] > 0) return j;
    return last;
}

/* Sample one row. Returns 0 if the distribution is not finite. */
INLINE int draw(const float *x, int64_t v, float temperature, int greedy, double u, float *weights, double *blocks,
                int32_t *token, float *logprob) {
    const vf scale = broadcast(temperature);
    const int64_t num_full = v / LANES * LANES, num_blocks = (v + BLOCK - 1) / BLOCK;
    vf top = broadcast(-INFINITY);
    for (int64_t j = 0; j < num_full; j += LANES) {
        vf y = load_f32(x + j) / scale;
        store_f32(weights + j, y);
        top = elementwise_max(top, y);
    }
    float max_score = lane_max(top);
    for (int64_t j = num_full; j < v; j++) {
        weights[j] = x[j] / temperature;
        max_score = weights[j] > max_score ? weights[j] : max_score;
    }
    int64_t index = -1;
    if (greedy)
        for (index = 0; index < v && weights[index] != max_score; index++) {}
    if (greedy && index == v) return 0;
    for (int64_t j = v; j < num_blocks * BLOCK; j++) weights[j] = -INFINITY;
    double total = 0;
    for (int64_t b = 0; b < num_blocks; b++) {
        vf sum = {0};
        for (int64_t j = b * BLOCK; j < (b + 1) * BLOCK; j += LANES) {
            vf e = vexp(load_f32(weights + j) - max_score);
            store_f32(weights + j, e);
            sum += e;
        }
        blocks[b] = lane_sum(sum);
        total += blocks[b];
    }
    if (!(total > 0 && total < INFINITY)) return 0;
    if (!greedy) index = inverse_cdf(weights, blocks, num_blocks, v, u);
    *token = (int32_t)index;
    *logprob = x[index] / temperature - max_score - (float)log(total);
    return 1;
}

/* logits [n, v] with the given row stride -> tokens [n] and their log-softmax(logits / temperature) [n]; row i is greedy
 * if top_k[i] <= 1. weights: room for v rounded up to BLOCK, blocks: one per BLOCK. Returns the number of rows whose
 * distribution is not finite; those are not written. */
int64_t sample_f32(const float *logits, int64_t stride, int64_t n, int64_t v, const float *temperatures,
                   const int32_t *top_k, const int64_t *seeds, const int64_t *positions, float *weights, double *blocks,
                   int32_t *tokens, float *logprobs) {
    int64_t num_invalid = 0;
    for (int64_t i = 0; i < n; i++) {
        double u = uniform((uint64_t)seeds[i], (uint64_t)positions[i]);
        num_invalid += !draw(logits + i * stride, v, temperatures[i], top_k[i] <= 1, u, weights, blocks, tokens + i,
                             logprobs + i);
    }
    return num_invalid;
}
