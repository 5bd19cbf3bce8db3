/* The small steps between the products, one call each instead of many. Included by _skinny.h, where its vector types stand. */

/* out[r] = x[r] / sqrt(mean of x[r]^2 + epsilon) * weight, for one row. */
TARGET static void VARIANT(norm)(const float *x, const float *weight, float *out, long size, float epsilon)
{
    VARIANT(floats) sums[2] = {0};
    long i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        for (int u = 0; u < 2; u++) {
            VARIANT(floats) v = *(const VARIANT(floats) *)(x + i + u * W);
            sums[u] += v * v;
        }
    float total = 0;
    for (int lane = 0; lane < W; lane++)
        total += sums[0][lane] + sums[1][lane];
    for (; i < size; i++)
        total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / size + epsilon);
    for (i = 0; i + W <= size; i += W)
        *(VARIANT(floats) *)(out + i) = *(const VARIANT(floats) *)(x + i) * scale * *(const VARIANT(floats) *)(weight + i);
    for (; i < size; i++)
        out[i] = x[i] * scale * weight[i];
}

/* g * sigmoid(s) * u: s is g for SiLU, and for GELU in its tanh form 2 sqrt(2 / pi) (g + 0.044715 g^3). */
TARGET static inline __attribute__((always_inline)) VARIANT(floats)
VARIANT(gate)(VARIANT(floats) g, VARIANT(floats) u, int activation)
{
    VARIANT(floats) s = activation == SILU ? g : g * 1.5957691216f * (g * g * 0.044715f + 1.0f);
    VARIANT(words) sign = (VARIANT(words))s & 0x80000000, negative = -(sign >> 31);
    VARIANT(floats) t = VARIANT(exponential)((VARIANT(floats))((VARIANT(words))s | 0x80000000)); /* exp(-|s|) */
    VARIANT(floats) one = t * 0.0f + 1.0f;
    VARIANT(floats) above = (VARIANT(floats))(((VARIANT(words))t & negative) | ((VARIANT(words))one & ~negative));
    return g * (above / (t + 1.0f)) * u;
}

/* Outputs of one panel of the first half of a gated MLP: activation(x gate^T) * (x up^T). */
TARGET static void VARIANT(gated)(const struct linear *p, const void *up, int activation, long panel)
{
    float g[MOST_ROWS * PANEL] __attribute__((aligned(64))), u[MOST_ROWS * PANEL] __attribute__((aligned(64)));
    long columns = p->N - panel * PANEL < PANEL ? p->N - panel * PANEL : PANEL;
    for (long first = 0; first < p->M; first += MOST_ROWS) {
        long rows = p->M - first < MOST_ROWS ? p->M - first : MOST_ROWS;
        VARIANT(any)(p->x + first * p->K, p->K, p->weights, panel, p->K, g, rows, p->type);
        VARIANT(any)(p->x + first * p->K, p->K, up, panel, p->K, u, rows, p->type);
        for (long i = 0; i < rows * PANEL; i += W)
            *(VARIANT(floats) *)(g + i) = VARIANT(gate)(*(VARIANT(floats) *)(g + i), *(VARIANT(floats) *)(u + i), activation);
        for (long r = 0; r < rows; r++)
            memcpy(p->out + (first + r) * p->N + panel * PANEL, g + r * PANEL, columns * sizeof(float));
    }
}
