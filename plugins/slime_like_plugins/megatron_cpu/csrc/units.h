/* Units of 4 bytes in products of experts: a float, or a pair of bf16. */
#define COLUMNS (2 * LANES)
#define CACHE_LINE 64       /* bytes */
#define ROWS_OF_TILE 12     /* with 2 vectors each and a panel's 2, they fit into 32 registers */
#define ROW_UNITS 98304     /* units of an expert's rows that stay in the cache while panel after panel is multiplied */
#define GRAD_OUTPUTS 192    /* outputs in a part of a gradient, a multiple of ROWS_OF_TILE; GRAD_ROWS: rows per pass */
#define GRAD_ROWS 768

typedef float unit_f32;
typedef uint32_t unit_bf16 __attribute__((aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t vh __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
#define depth_f32 1
#define depth_bf16 2

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vu){__VA_ARGS__})
#endif
#define LIST(...) __VA_ARGS__
#define EXCHANGE(from, to, distance, low, high)                 \
    for (int r = 0; r < LANES; r++)                             \
        if (!(r & distance)) {                                  \
            const vu a = from[r], b = from[r + distance];       \
            to[r] = SHUFFLE(a, b, LIST low);                    \
            to[r + distance] = SHUFFLE(a, b, LIST high);        \
        }

/* to [LANES, LANES], rows `step` apart, = the transpose of from [LANES, LANES], rows `stride` apart. In four stages,
 * pairs of rows exchange blocks of 1, 2, 4 and 8 numbers. */
INLINE void transpose_square(const uint32_t *from, int64_t stride, uint32_t *to, int64_t step) {
    vu x[LANES], y[LANES];
    for (int r = 0; r < LANES; r++) x[r] = *(const vu *)(from + r * stride);
    EXCHANGE(x, y, 1, (0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             (1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    EXCHANGE(y, x, 2, (0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             (2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(x, y, 4, (0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             (4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(y, x, 8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    for (int r = 0; r < LANES; r++) *(vu *)(to + r * step) = x[r];
}
#undef EXCHANGE
#undef LIST
#undef SHUFFLE

INLINE unit_f32 join_f32(float first, float second) { return first; }
INLINE unit_bf16 join_bf16(bf16 first, bf16 second) { return (uint32_t)first | (uint32_t)second << 16; }

/* sum + the products of a unit with the units of a vector */
INLINE vf mac_f32(vf sum, float a, const float *panel) { return sum + a * get(panel); }
INLINE void put_f32(float *to, vf x) { put(to, x); }

#if defined(__AVX512BF16__)
#include <immintrin.h>
INLINE vf mac_bf16(vf sum, uint32_t a, const unit_bf16 *panel) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)_mm512_loadu_si512(panel));
}
INLINE void put_bf16(bf16 *to, vf x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
#else
INLINE vf mac_bf16(vf sum, uint32_t a, const unit_bf16 *panel) {
    const vu b = *(const vu *)panel;
    return sum + as_float(a << 16) * (vf)(b << 16) + as_float(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
}
INLINE void put_bf16(bf16 *to, vf x) {
    for (int i = 0; i < LANES; i++) to[i] = store_bf16(x[i]);
}
#endif

/* 1 if products of experts are faster than torch's on this CPU */
#if defined(__AVX512F__)
int64_t multiplies_f32(void) { return 1; }
#else
int64_t multiplies_f32(void) { return 0; }
#endif
#if defined(__AVX512BF16__)
int64_t multiplies_bf16(void) { return 1; }
#else
int64_t multiplies_bf16(void) { return 0; }
#endif
