/* One variant of attention for the few rows of a verification pass. Included by _skinny.h, where its vector types stand.

   For each query row: scores against every key, softmax, weighted sum of the values, all in float32. Sums over keys run in the
   order of the keys, and a masked key adds nothing, so a row's result does not depend, to the last bit, on the rows beside it or
   on keys that it does not see. */

/* exp(x) for x <= 0; 0 below the smallest normal number. Range reduction and a polynomial, as in Cephes; error below 2 ulp. */
TARGET static inline VARIANT(floats) VARIANT(exponential)(VARIANT(floats) x)
{
    VARIANT(words) normal = (VARIANT(words))(x > -87.0f);
    x = (VARIANT(floats))((VARIANT(words))x & normal);
    VARIANT(floats) n = x * 1.44269504f + 0x1.8p23f; /* adding 1.5 * 2^23 leaves the nearest whole number in the low bits */
    VARIANT(words) power = (VARIANT(words))n << 23;
    n -= 0x1.8p23f;
    x = x - n * 0.693359375f - n * -2.12194440e-4f;
    VARIANT(floats) y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    return (VARIANT(floats))(((VARIANT(words))y + power) & normal);
}

/* Turns W vectors of W floats around: on return, vector i holds element i of each. log2(W) perfect shuffles. */
TARGET static inline __attribute__((always_inline)) void VARIANT(transpose)(VARIANT(floats) *v)
{
    for (int round = 1; round < W; round *= 2) {
        VARIANT(floats) turned[W];
        for (int i = 0; i < W / 2; i++) {
            turned[2 * i] = __builtin_shufflevector(v[i], v[i + W / 2], LOW);
            turned[2 * i + 1] = __builtin_shufflevector(v[i], v[i + W / 2], HIGH);
        }
        for (int i = 0; i < W; i++)
            v[i] = turned[i];
    }
}

/* scores[r][j] = scaling * q[r] . keys[j] for `rows` rows, W keys at a time, a key in each lane; size is a multiple of W. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(scores)(const float *const *q, const float *keys, float *scores, long stride, long m, const int rows, float scaling, long size)
{
    for (long j = 0; j < m; j += W) {
        VARIANT(floats) sum[ATTEND_ROWS] = {0};
        for (long d = 0; d < size; d += W) {
            VARIANT(floats) k[W];
            for (long i = 0; i < W; i++) /* behind the last key its values stand in, and are masked later */
                k[i] = *(const VARIANT(floats) *)(keys + (j + i < m ? j + i : m - 1) * size + d);
            VARIANT(transpose)(k);
            for (int i = 0; i < W; i++)
                for (int r = 0; r < rows; r++)
                    sum[r] += k[i] * q[r][d + i];
        }
        for (int r = 0; r < rows; r++)
            *(VARIANT(floats) *)(scores + r * stride + j) = sum[r] * scaling;
    }
}

/* out[r] = sum over j of weights[r][j] * values[j] over the sum of the weights and `extra[r]`, keys in order, for `rows` rows. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(mix)(const float *weights, long stride, const float *values, float *const *out, const float *extra, long m,
             const int rows, const int vectors, long size)
{
    float total[4];
    for (long v = 0; v < size / W; v += vectors) {
        VARIANT(floats) sum[4 * 2] = {0};
        for (int r = 0; r < rows; r++)
            total[r] = extra[r];
        for (long j = 0; j < m; j++) {
            for (int r = 0; r < rows; r++)
                total[r] += weights[r * stride + j];
            for (int u = 0; u < vectors; u++) {
                VARIANT(floats) value = *(const VARIANT(floats) *)(values + j * size + (v + u) * W);
                for (int r = 0; r < rows; r++)
                    sum[r * vectors + u] += value * weights[r * stride + j];
            }
        }
        for (int r = 0; r < rows; r++)
            for (int u = 0; u < vectors; u++)
                *(VARIANT(floats) *)(out[r] + (v + u) * W) = sum[r * vectors + u] / total[r];
    }
}

#define SCORES(n)                                                                                                             \
    case n:                                                                                                                   \
        VARIANT(scores)(q, keys, scores, stride, m, n, p->scaling, p->key_size);                                              \
        break;
#define MIX(n, vectors)                                                                                                       \
    case n:                                                                                                                   \
        VARIANT(mix)(scores + r * stride, stride, values, out + r, extra + r, m, n, vectors, p->value_size);                             \
        break;

/* `rows` query rows of one key-value head: row i is of head first_head + i / n, node i % n. */
TARGET static void VARIANT(attend)(const struct attention *p, long kv_head, long first, long rows, float *scores)
{
    long group = p->heads / p->kv_heads, m = p->m, stride = (m + W - 1) / W * W;
    const float *keys = p->keys + kv_head * p->key_stride, *values = p->values + kv_head * p->value_stride;
    const float *q[ATTEND_ROWS];
    float *out[ATTEND_ROWS], extra[ATTEND_ROWS];
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group + (first + r) / p->n, node = (first + r) % p->n;
        q[r] = p->q + head * p->q_head_stride + node * p->q_row_stride;
        out[r] = p->out + (node * p->heads + head) * p->value_size;
    }
    switch (rows) {
        SCORES(1) SCORES(2) SCORES(3) SCORES(4) SCORES(5) SCORES(6)
        SCORES(7) SCORES(8) SCORES(9) SCORES(10) SCORES(11) SCORES(12)
    }
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group + (first + r) / p->n, node = (first + r) % p->n;
        float *row = scores + r * stride;
        for (long j = 0; p->mask && j < p->mask_columns; j++)
            row[m - p->mask_columns + j] += p->mask[node * p->mask_columns + j];
        for (long j = m; j < stride; j++)
            row[j] = -INFINITY;
        float most = p->sinks ? p->sinks[head] : -INFINITY;
        VARIANT(floats) highest = *(VARIANT(floats) *)row;
        for (long j = W; j < stride; j += W) {
            VARIANT(floats) next = *(VARIANT(floats) *)(row + j);
            VARIANT(words) higher = (VARIANT(words))(next > highest);
            highest = (VARIANT(floats))(((VARIANT(words))next & higher) | ((VARIANT(words))highest & ~higher));
        }
        for (int i = 0; i < W; i++)
            most = highest[i] > most ? highest[i] : most;
        for (long j = 0; j < stride; j += W)
            *(VARIANT(floats) *)(row + j) = VARIANT(exponential)(*(VARIANT(floats) *)(row + j) - most);
        extra[r] = p->sinks ? expf(p->sinks[head] - most) : 0.0f;
    }
    int paired = p->value_size / W % 2 == 0;
    for (long r = 0; r < rows; r += 4)
        if (paired)
            switch (rows - r) {
                MIX(1, 2) MIX(2, 2) MIX(3, 2)
                default: VARIANT(mix)(scores + r * stride, stride, values, out + r, extra + r, m, 4, 2, p->value_size);
            }
        else
            switch (rows - r) {
                MIX(1, 1) MIX(2, 1) MIX(3, 1)
                default: VARIANT(mix)(scores + r * stride, stride, values, out + r, extra + r, m, 4, 1, p->value_size);
            }
}
#undef SCORES
#undef MIX
