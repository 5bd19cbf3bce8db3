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

TARGET static inline float VARIANT(total)(VARIANT(floats) v)
{
    float lane[W], sum = 0.0f;
    *(VARIANT(floats) *)lane = v;
    for (int half = W / 2; half; half /= 2) /* pairwise, which the compiler keeps in registers */
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    sum = lane[0];
    return sum;
}

/* scores[r][j] = scaling * q[r] . keys[j] for `rows` rows and `vectors` * W elements, a constant after inlining. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(scores)(const float *const *q, const float *keys, float *scores, long stride, long m, long rows, float scaling,
                const int vectors)
{
    for (long j = 0; j < m; j++) {
        const float *key = keys + j * vectors * W;
        VARIANT(floats) k[MOST_HEAD / W];
        for (int v = 0; v < vectors; v++)
            k[v] = *(const VARIANT(floats) *)(key + v * W);
        for (long r = 0; r < rows; r++) {
            VARIANT(floats) sum = *(const VARIANT(floats) *)q[r] * k[0];
            for (int v = 1; v < vectors; v++)
                sum += *(const VARIANT(floats) *)(q[r] + v * W) * k[v];
            scores[r * stride + j] = VARIANT(total)(sum) * scaling;
        }
    }
}

/* out[r] = sum over j of weights[r][j] * values[j], keys in order, for `vectors` * W elements. */
TARGET static inline __attribute__((always_inline)) void
VARIANT(mix)(const float *weights, long stride, const float *values, float *const *out, long m, long rows, const int vectors)
{
    for (long r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            *(VARIANT(floats) *)(out[r] + v * W) = (VARIANT(floats)){0};
    for (long first = 0; first < m; first += KEYS) { /* a stretch of values that stays in the first cache for all rows */
        long last = first + KEYS < m ? first + KEYS : m;
        for (long r = 0; r < rows; r++) {
            VARIANT(floats) sum[MOST_HEAD / W];
            for (int v = 0; v < vectors; v++)
                sum[v] = *(VARIANT(floats) *)(out[r] + v * W);
            for (long j = first; j < last; j++) {
                float weight = weights[r * stride + j];
                for (int v = 0; v < vectors; v++)
                    sum[v] += *(const VARIANT(floats) *)(values + (j * vectors + v) * W) * weight;
            }
            for (int v = 0; v < vectors; v++)
                *(VARIANT(floats) *)(out[r] + v * W) = sum[v];
        }
    }
}

#define CASES(call)                                                                                                           \
    case 16 / W: call(16 / W); break;                                                                                         \
    case 32 / W: call(32 / W); break;                                                                                         \
    case 64 / W: call(64 / W); break;                                                                                         \
    case 80 / W: call(80 / W); break;                                                                                         \
    case 96 / W: call(96 / W); break;                                                                                         \
    case 128 / W: call(128 / W); break;                                                                                       \
    case 192 / W: call(192 / W); break;                                                                                       \
    case 256 / W: call(256 / W); break;

/* `rows` query rows of one key-value head: row i is of head first_head + i / n, node i % n. */
TARGET static void VARIANT(attend)(const struct attention *p, long kv_head, long first, long rows, float *scores)
{
    long group = p->heads / p->kv_heads, m = p->m, stride = (m + W - 1) / W * W;
    const float *keys = p->keys + kv_head * p->key_stride, *values = p->values + kv_head * p->value_stride;
    const float *q[ATTEND_ROWS];
    float *out[ATTEND_ROWS];
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group + (first + r) / p->n, node = (first + r) % p->n;
        q[r] = p->q + head * p->q_head_stride + node * p->q_row_stride;
        out[r] = p->out + (node * p->heads + head) * p->value_size;
    }
#define CALL(vectors) VARIANT(scores)(q, keys, scores, stride, m, rows, p->scaling, vectors)
    switch (p->key_size / W) { CASES(CALL) }
#undef CALL
    for (long r = 0; r < rows; r++) {
        long head = kv_head * group + (first + r) / p->n, node = (first + r) % p->n;
        float *row = scores + r * stride;
        for (long j = 0; p->mask && j < p->mask_columns; j++)
            row[m - p->mask_columns + j] += p->mask[node * p->mask_columns + j];
        for (long j = m; j < stride; j++)
            row[j] = -INFINITY;
        float most = p->sinks ? p->sinks[head] : -INFINITY, sum = 0.0f;
        for (long j = 0; j < m; j++)
            most = row[j] > most ? row[j] : most;
        for (long j = 0; j < stride; j += W)
            *(VARIANT(floats) *)(row + j) = VARIANT(exponential)(*(VARIANT(floats) *)(row + j) - most);
        for (long j = 0; j < m; j++)
            sum += row[j];
        if (p->sinks)
            sum += expf(p->sinks[head] - most);
        for (long j = 0; j < stride; j += W)
            *(VARIANT(floats) *)(row + j) /= sum;
    }
#define CALL(vectors) VARIANT(mix)(scores, stride, values, out, m, rows, vectors)
    switch (p->value_size / W) { CASES(CALL) }
#undef CALL
}
#undef CASES
