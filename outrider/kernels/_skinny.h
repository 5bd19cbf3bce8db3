/* One variant of the skinny matrix product, written with the compilers' vector extensions.

   Included once per instruction set with: VARIANT(name) to name its functions, W floats in a vector, LOW and HIGH
   the lanes that interleave two of them, ROWS rows at a time in
   registers, TARGET the function attribute. Weights are packed in panels of PANEL outputs, [N / PANEL][K][PANEL]; each weight
   is widened to float32 exactly. Every output is one sum over k in rising order, whatever the number of rows, so a row's result
   does not depend, to the last bit, on the rows beside it. */

typedef float VARIANT(floats) __attribute__((vector_size(W * 4), aligned(4)));
typedef uint32_t VARIANT(words) __attribute__((vector_size(W * 4), aligned(4)));
typedef uint16_t VARIANT(halves) __attribute__((vector_size(W * 2), aligned(2)));

TARGET static inline VARIANT(floats) VARIANT(widen)(const void *weights, long at, int type)
{
    if (type == FLOAT32)
        return *(const VARIANT(floats) *)((const float *)weights + at);
    VARIANT(words) bits = __builtin_convertvector(*(const VARIANT(halves) *)((const uint16_t *)weights + at), VARIANT(words));
    if (type == BFLOAT16)
        return (VARIANT(floats))(bits << 16);
    /* float16: move exponent and fraction into float32's places, then scale by 2^(127 - 15); subnormals come out right. */
    VARIANT(floats) magnitude = (VARIANT(floats))((bits & 0x7fff) << 13) * 0x1p112f;
    return (VARIANT(floats))((VARIANT(words))magnitude | (bits & 0x8000) << 16);
}

/* tile[r][c] += sum over k of x[r][k] * w[k][c], for `rows` rows (a constant after inlining) and VECTORS * W columns. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(block)(const float *x, long stride, const void *weights, long at, long depth, float *tile, const int rows, const int vectors,
               const int type)
{
    VARIANT(floats) sum[ROWS * (PANEL / W)];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r * vectors + v] = *(VARIANT(floats) *)(tile + r * PANEL + v * W);
    const long line = PANEL * (type == FLOAT32 ? 4 : 2);
    const char *ahead = (const char *)weights + at / PANEL * line + AHEAD * line;
    for (long k = 0; k < depth; k++) {
        __builtin_prefetch(ahead + k * line); /* across pages, where the processor's own prefetching stops */
        VARIANT(floats) w[PANEL / W];
        for (int v = 0; v < vectors; v++)
            w[v] = VARIANT(widen)(weights, at + k * PANEL + v * W, type);
        for (int r = 0; r < rows; r++) {
            float a = x[r * stride + k];
            for (int v = 0; v < vectors; v++)
                sum[r * vectors + v] += w[v] * a;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(VARIANT(floats) *)(tile + r * PANEL + v * W) = sum[r * vectors + v];
}

#define CASE(n)                                                                                                               \
    case n:                                                                                                                   \
        VARIANT(block)(x, stride, weights, at, depth, tile, n, vectors, type);                                                \
        break;

TARGET static inline __attribute__((always_inline)) void
VARIANT(rows)(const float *x, long stride, const void *weights, long at, long depth, float *tile, int rows, const int vectors,
              const int type)
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
    if (rows == 1) { /* memory decides: all columns at once, for enough independent sums */
        VARIANT(block)(x, stride, weights, panel * K * PANEL, K, tile, 1, PANEL / W, type);
        return;
    }
    long groups = (rows + ROWS - 1) / ROWS;
    for (long k = 0; k < K; k += DEPTH) { /* a stretch of the panel that stays in the first cache for all rows */
        long depth = K - k < DEPTH ? K - k : DEPTH;
        for (long column = 0; column < PANEL; column += VECTORS * W)
            for (long g = 0; g < groups; g++) {
                long first = g * rows / groups, last = (g + 1) * rows / groups;
                VARIANT(rows)(x + first * stride + k, stride, weights, (panel * K + k) * PANEL + column, depth,
                              tile + first * PANEL + column, last - first, VECTORS, type);
            }
    }
}

TARGET static void VARIANT(linear)(const struct linear *p, long panel)
{
    float tile[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    long columns = p->N - panel * PANEL < PANEL ? p->N - panel * PANEL : PANEL;
    for (long first = 0; first < p->M; first += MOST_ROWS) {
        long rows = p->M - first < MOST_ROWS ? p->M - first : MOST_ROWS;
        const float *x = p->x + first * p->K;
        if (p->type == BFLOAT16)
            VARIANT(panel)(x, p->K, p->weights, panel, p->K, tile, rows, BFLOAT16);
        else if (p->type == FLOAT16)
            VARIANT(panel)(x, p->K, p->weights, panel, p->K, tile, rows, FLOAT16);
        else
            VARIANT(panel)(x, p->K, p->weights, panel, p->K, tile, rows, FLOAT32);
        for (long r = 0; r < rows; r++) {
            float *out = p->out + (first + r) * p->N + panel * PANEL;
            for (long c = 0; c < columns; c++)
                out[c] = tile[r * PANEL + c] + (p->bias ? p->bias[panel * PANEL + c] : 0.0f);
        }
    }
}

#include "_attend.h"

#undef VARIANT
#undef W
#undef LOW
#undef HIGH
#undef ROWS
#undef VECTORS
#undef TARGET
