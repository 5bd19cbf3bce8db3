/* One variant of the skinny matrix product, written with the compilers' vector extensions.

   Included once per instruction set with: VARIANT(name) to name its functions, W floats in a vector, LOW and HIGH
   the lanes that interleave two of them, ROWS rows at a time in
   registers, TARGET the function attribute. Weights are packed in panels of PANEL outputs, [N / PANEL][K][PANEL]; each weight
   is widened to float32 exactly. Every output is one sum over k in rising order, whatever the number of rows, so a row's result
   does not depend, to the last bit, on the rows beside it. */

typedef float VARIANT(floats) __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t VARIANT(words) __attribute__((vector_size(W * 4), aligned(4)));
/* 2 * W weights of one k: outputs c to c + W of the panel in `low`, outputs c + HALF to c + HALF + W in `high`. Weights of 16 bits
   are packed in such pairs, c in the lower half of a word, so that one load and two cheap operations widen both. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(widen)(const void *weights, long k, long c, const int type, VARIANT(floats) *low, VARIANT(floats) *high)
{
    if (type == FLOAT32) {
        *low = *(const VARIANT(floats) *)((const float *)weights + k * PANEL + c);
        *high = *(const VARIANT(floats) *)((const float *)weights + k * PANEL + HALF + c);
        return;
    }
    VARIANT(words) both = *(const VARIANT(words) *)((const uint32_t *)weights + k * HALF + c);
    if (type == BFLOAT16) {
        *low = (VARIANT(floats))(both << 16);
        *high = (VARIANT(floats))(both & 0xffff0000);
        return;
    }
    /* float16: move exponent and fraction into float32's places, then scale by 2^(127 - 15); subnormals come out right. */
    VARIANT(floats) small = (VARIANT(floats))((both & 0x7fff) << 13) * 0x1p112f;
    *low = (VARIANT(floats))((VARIANT(words))small | (both & 0x8000) << 16);
    small = (VARIANT(floats))((both >> 16 & 0x7fff) << 13) * 0x1p112f;
    *high = (VARIANT(floats))((VARIANT(words))small | (both & 0x80000000));
}

/* tile[r][c] += sum over k of x[r][k] * w[k][c], for `rows` rows and `pairs` * 2 * W columns: constants after inlining. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(block)(const float *x, long stride, const void *weights, long depth, float *tile, long column, const int rows, const int pairs,
               const int type)
{
    VARIANT(floats) sum[ROWS * 2 * (HALF / W)];
    for (int r = 0; r < rows; r++)
        for (int u = 0; u < 2 * pairs; u++)
            sum[r * 2 * pairs + u] = *(VARIANT(floats) *)(tile + r * PANEL + u % 2 * HALF + column + u / 2 * W);
    const long line = PANEL * (type == FLOAT32 ? 4 : 2);
    const char *ahead = (const char *)weights + AHEAD * line;
    for (long k = 0; k < depth; k++) {
        __builtin_prefetch(ahead + k * line); /* across pages, where the processor's own prefetching stops */
        VARIANT(floats) w[2 * (HALF / W)];
        for (int u = 0; u < pairs; u++)
            VARIANT(widen)(weights, k, column + u * W, type, &w[2 * u], &w[2 * u + 1]);
        for (int r = 0; r < rows; r++) {
            float a = x[r * stride + k];
            for (int u = 0; u < 2 * pairs; u++)
                sum[r * 2 * pairs + u] += w[u] * a;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int u = 0; u < 2 * pairs; u++)
            *(VARIANT(floats) *)(tile + r * PANEL + u % 2 * HALF + column + u / 2 * W) = sum[r * 2 * pairs + u];
}

#define CASE(n)                                                                                                               \
    case n:                                                                                                                   \
        VARIANT(block)(x, stride, weights, depth, tile, column, n, PAIRS, type);                                              \
        break;

TARGET static inline __attribute__((always_inline)) void
VARIANT(rows)(const float *x, long stride, const void *weights, long depth, float *tile, long column, int rows, const int type)
{
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS >= 6
        CASE(5) CASE(6)
#endif
#if ROWS >= 12
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

/* One panel: tile[rows][PANEL] = x[rows][K] times the panel. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(panel)(const float *x, long stride, const void *weights, long panel, long K, float *tile, long rows, const int type)
{
    memset(tile, 0, rows * PANEL * sizeof(float));
    const char *first_weight = (const char *)weights + panel * K * PANEL * (type == FLOAT32 ? 4 : 2);
    if (rows == 1) { /* memory decides: all columns at once, for enough independent sums */
        VARIANT(block)(x, stride, first_weight, K, tile, 0, 1, HALF / W, type);
        return;
    }
    long groups = (rows + ROWS - 1) / ROWS;
    for (long k = 0; k < K; k += DEPTH) { /* a stretch of the panel that stays in the first cache for all rows */
        long depth = K - k < DEPTH ? K - k : DEPTH;
        const char *stretch = first_weight + k * PANEL * (type == FLOAT32 ? 4 : 2);
        for (long column = 0; column < HALF; column += PAIRS * W)
            for (long g = 0; g < groups; g++) {
                long first = g * rows / groups, last = (g + 1) * rows / groups;
                VARIANT(rows)(x + first * stride + k, stride, stretch, depth, tile + first * PANEL, column, last - first, type);
            }
    }
}

TARGET static void
VARIANT(any)(const float *x, long stride, const void *weights, long panel, long K, float *tile, long rows, int type)
{
    if (type == BFLOAT16)
        VARIANT(panel)(x, stride, weights, panel, K, tile, rows, BFLOAT16);
    else if (type == FLOAT16)
        VARIANT(panel)(x, stride, weights, panel, K, tile, rows, FLOAT16);
    else
        VARIANT(panel)(x, stride, weights, panel, K, tile, rows, FLOAT32);
}

TARGET static void VARIANT(linear)(const struct linear *p, long panel)
{
    float tile[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    long columns = p->N - panel * PANEL < PANEL ? p->N - panel * PANEL : PANEL;
    for (long first = 0; first < p->M; first += MOST_ROWS) {
        long rows = p->M - first < MOST_ROWS ? p->M - first : MOST_ROWS;
        VARIANT(any)(p->x + first * p->K, p->K, p->weights, panel, p->K, tile, rows, p->type);
        for (long r = 0; r < rows; r++) {
            float *out = p->out + (first + r) * p->N + panel * PANEL;
            for (long c = 0; c < columns; c++)
                out[c] = tile[r * PANEL + c] + (p->bias ? p->bias[panel * PANEL + c] : 0.0f);
        }
    }
}

#include "_attend.h"
#include "_steps.h"

#undef VARIANT
#undef W
#undef LOW
#undef HIGH
#undef ROWS
#undef PAIRS
#undef TARGET
