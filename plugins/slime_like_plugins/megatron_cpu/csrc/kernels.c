/* Leaf kernels of training on a CPU: plain C, no libraries, pointers and sizes only. Called through ctypes.
 *
 * Every kernel computes in float32 and rounds once when it stores, for float32 and bfloat16. Rows are split evenly among
 * `threads` threads; sums over rows are computed per thread and added by the caller in order, so the bits depend only on
 * the number of threads.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define EACH_LANE _Pragma("omp simd")
#define TEXT(x) #x
#define MAX_OF(...) _Pragma(TEXT(omp simd reduction(max : __VA_ARGS__)))
#define SUM_OF(...) _Pragma(TEXT(omp simd reduction(+ : __VA_ARGS__)))
#if defined(_OPENMP)
#include <omp.h>
#define SHARED(threads) _Pragma(TEXT(omp parallel num_threads(threads) if ((threads) > 1)))
#define ROWS _Pragma("omp for schedule(static)")
#define PARTS _Pragma("omp for schedule(dynamic, 1)")
#define THREAD omp_get_thread_num()
#else
#define SHARED(threads)
#define ROWS
#define PARTS
#define THREAD 0
#endif

INLINE float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE float load_f32(float x) { return x; }
INLINE float store_f32(float x) { return x; }
INLINE float load_bf16(bf16 x) { return as_float((uint32_t)x << 16); }
INLINE bf16 store_bf16(float x) {
    uint32_t bits = as_bits(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16; /* to nearest, ties to even */
    return (bf16)(x != x ? 0x7fc0u : rounded);
}

/* exp by the reduction and polynomial of Cephes' expf (S. Moshier), within 2 units in the last place if the result is a
 * normal number; x is clamped to that range. NaN stays NaN. */
INLINE float exponential(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounds to the nearest integer */
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * as_float((uint32_t)((int32_t)n + 127) << 23);
}

#define BLOCK 1024 /* numbers summed in one float32 */

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

#include "rows.h"
#include "units.h"

#define T float
#define NAME(f) f##_f32
#include "typed.h"
#include "attention.h"
#include "vocab.h"
#include "experts.h"
#undef T
#undef NAME
#define T bf16
#define NAME(f) f##_bf16
#include "typed.h"
#include "attention.h"
#include "vocab.h"
#include "experts.h"
